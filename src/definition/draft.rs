//! Older drafts of JSON Schema, in the words of 2020-12.

use serde_json::Value;

use super::Node;
use super::walk::{
    Place, any_in, dangles, each_node, is_no_assertion, place, reference, spell_out,
};

#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Draft {
    Four,
    Six,
    Seven,
    Nineteen,
    Twenty,
}

impl Draft {
    fn of(root: &Node) -> Self {
        let named = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let older = [
            ("draft-04", Self::Four),
            ("draft-06", Self::Six),
            ("draft-07", Self::Seven),
            ("2019-09", Self::Nineteen),
        ];
        let found = older.into_iter().find(|(part, _)| named.contains(part));
        found.map_or(Self::Twenty, |(_, draft)| draft)
    }

    /// Whether a keyword means anything in this draft.
    fn knows(self, keyword: &str) -> bool {
        let since = match keyword {
            "const" | "contains" | "propertyNames" => Self::Six,
            "if" | "then" | "else" => Self::Seven,
            "dependentRequired"
            | "dependentSchemas"
            | "minContains"
            | "maxContains"
            | "unevaluatedItems"
            | "unevaluatedProperties" => Self::Nineteen,
            "prefixItems" => Self::Twenty,
            _ => Self::Four,
        };
        self >= since
    }
}

/// The same schema in 2020-12, unless it refers by anything but pointers from its root to schemas.
pub(super) fn modernize(root: &Node) -> Option<Node> {
    let draft = Draft::of(root);
    let mut root = root.clone();
    root.remove("$id");
    if draft == Draft::Four {
        root.remove("id");
    }
    let by_name = |node: &Node| {
        let has = |key: &str| node.get(key).is_some_and(Value::is_string);
        has("$id")
            || (draft == Draft::Four && has("id"))
            || has("$dynamicRef")
            || has("$recursiveRef")
            || reference(node).is_some_and(|it| it != "#" && !it.starts_with("#/"))
    };
    if any_in(&root, &by_name) {
        return None;
    }
    let renamed = take_definitions(&mut root);
    let mut schema = Value::Object(root);
    each_node(&mut schema, &mut |node| {
        modernize_node(node, draft);
        let rest = reference(node).and_then(|it| it.strip_prefix("#/definitions/"));
        if let Some(rest) = rest.filter(|_| renamed) {
            node.insert("$ref".into(), format!("#/$defs/{rest}").into());
        }
        for (keyword, value) in node.iter_mut() {
            match (place(keyword, value), value) {
                (Place::Elements, Value::Array(schemas)) => {
                    schemas.iter_mut().for_each(spell_out);
                }
                (Place::Values, Value::Object(schemas)) => {
                    schemas.values_mut().for_each(spell_out);
                }
                _ => {}
            }
        }
    });
    // A reference that leads nowhere now could lead to what is put there later.
    if dangles(&schema) {
        return None;
    }
    match schema {
        Value::Object(root) => Some(root),
        _ => None,
    }
}

/// Moves the root's `definitions` to `$defs`, unless a name is in both.
fn take_definitions(root: &mut Node) -> bool {
    let (old, new) = (root.get("definitions"), root.get("$defs"));
    let Some(old) = old.and_then(Value::as_object) else { return false };
    let mut both = match new {
        None => Node::new(),
        Some(Value::Object(new)) => new.clone(),
        Some(_) => return false,
    };
    if old.keys().any(|name| both.contains_key(name)) {
        return false;
    }
    both.extend(old.iter().map(|(name, schema)| (name.clone(), schema.clone())));
    root.remove("definitions");
    root.insert("$defs".into(), both.into());
    true
}

fn modernize_node(node: &mut Node, draft: Draft) {
    // Nothing refers to these, or the schema would not be translated.
    for keyword in ["$schema", "$anchor", "$dynamicAnchor", "$recursiveAnchor"] {
        node.remove(keyword);
    }
    if draft <= Draft::Seven && reference(node).is_some() {
        node.retain(|key, _| key == "$ref" || is_no_assertion(key));
    }
    node.retain(|keyword, _| draft.knows(keyword));
    if draft < Draft::Twenty {
        let rest = node.remove("additionalItems");
        if let Some(first) = node.remove("items") {
            if first.is_array() {
                node.insert("prefixItems".into(), first);
                node.extend(rest.map(|rest| ("items".into(), rest)));
            } else {
                node.insert("items".into(), first);
            }
        }
    }
    for (exclusive, inclusive) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")]
    {
        if let Some(&Value::Bool(excludes)) = node.get(exclusive) {
            node.remove(exclusive);
            if let Some(bound) = node.remove(inclusive) {
                let keyword = if excludes { exclusive } else { inclusive };
                node.insert(keyword.into(), bound);
            }
        }
    }
    let split = ["dependentRequired", "dependentSchemas"];
    if !split.iter().any(|key| node.contains_key(*key)) {
        if let Some(Value::Object(all)) = node.remove("dependencies") {
            let (names, schemas): (Node, Node) = all.into_iter().partition(|(_, it)| it.is_array());
            for (keyword, part) in split.into_iter().zip([names, schemas]) {
                if !part.is_empty() {
                    node.insert(keyword.into(), part.into());
                }
            }
        }
    }
}
