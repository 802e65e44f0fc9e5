//! The schemas of a registry, each compiled once.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{Arc, OnceLock, Weak};

use foldhash::fast::FixedState;
use serde_json::Value;

use super::{InvalidSchema, Schema, Shared, build, in_order};

/// How many schemas of a pool stay compiled although nobody used them yet.
const MOST_COMPILED: usize = 1_000;

/// The schemas of a registry: equal ones share a validator. The first [`MOST_COMPILED`] of those in
/// use stay compiled; one beyond that is compiled to be checked, given up, and compiled again when
/// it is first used. A schema that nobody uses any more is gone.
#[derive(Default)]
pub(crate) struct SchemaPool {
    known: HashMap<u64, Vec<Weak<Shared>>, FixedState>,
    /// How many are in `known`, and how many there were when the unused ones were last removed.
    entries: usize,
    swept: usize,
    /// Held by each schema that stays compiled.
    seats: Arc<()>,
}

impl SchemaPool {
    pub(crate) fn compile(
        &mut self,
        schema: &Value,
        formats: bool,
    ) -> Result<Schema, InvalidSchema> {
        let text = in_order(schema)?;
        let key = FixedState::default().hash_one((&*text, formats));
        let same = |shared: &Arc<Shared>| shared.formats == formats && shared.text == text;
        let known = self.known.get(&key).into_iter().flatten();
        if let Some(shared) = known.filter_map(Weak::upgrade).find(same) {
            return Ok(Schema(shared));
        }
        let (bounds, validator) = build(&text, formats)?;
        let seat =
            (Arc::strong_count(&self.seats) <= MOST_COMPILED).then(|| Arc::clone(&self.seats));
        let validator = if seat.is_some() { OnceLock::from(validator) } else { OnceLock::new() };
        let shared = Arc::new(Shared::new(text, formats, &bounds, validator, seat));
        self.sweep();
        self.known.entry(key).or_default().push(Arc::downgrade(&shared));
        self.entries += 1;
        Ok(Schema(shared))
    }

    /// Removes what nobody uses, once as many were added as were left.
    fn sweep(&mut self) {
        if self.entries < 2 * self.swept.max(32) {
            return;
        }
        self.known.retain(|_, schemas| {
            schemas.retain(|schema| schema.strong_count() > 0);
            !schemas.is_empty()
        });
        self.entries = self.known.values().map(Vec::len).sum();
        self.swept = self.entries;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn numbered(number: usize) -> Value {
        json!({ "const": number })
    }

    fn is_compiled(schema: &Schema) -> bool {
        schema.0.validator.get().is_some()
    }

    #[test]
    fn equal_schemas_share_a_validator() {
        let mut pool = SchemaPool::default();
        let text = r#"{"type": "object", "properties": {"a": {}, "b": {"enum": [1, 1.0]}}}"#;
        let turned = r#"{"properties": {"b": {"enum": [1, 1.0]}, "a": {}}, "type": "object"}"#;
        let [one, other] = [text, turned].map(|text| {
            let schema = serde_json::from_str(text).expect("JSON");
            pool.compile(&schema, false).expect("a schema")
        });
        assert!(Arc::ptr_eq(&one.0, &other.0));

        let checked = pool.compile(&json!({ "type": "object" }), true).expect("a schema");
        let unchecked = pool.compile(&json!({ "type": "object" }), false).expect("a schema");
        assert!(!Arc::ptr_eq(&checked.0, &unchecked.0));
        let [whole, real] = [json!({ "const": 1 }), json!({ "const": 1.0 })];
        let whole = pool.compile(&whole, false).expect("a schema");
        let real = pool.compile(&real, false).expect("a schema");
        assert!(!Arc::ptr_eq(&whole.0, &real.0));
        assert_eq!(pool.entries, 5);
    }

    #[test]
    fn a_pool_refuses_what_a_schema_refuses() {
        let mut pool = SchemaPool::default();
        let error = pool.compile(&json!({ "type": 5 }), false).expect_err("no schema");
        assert_eq!(error, Schema::new(&json!({ "type": 5 })).expect_err("no schema"));
        assert_eq!(pool.entries, 0);
    }

    #[test]
    fn past_a_number_of_schemas_one_is_compiled_when_it_is_used() {
        let mut pool = SchemaPool::default();
        let mut compile = |number| pool.compile(&numbered(number), false).expect("a schema");
        let mut kept: Vec<Schema> = (0..MOST_COMPILED).map(&mut compile).collect();
        assert!(kept.iter().all(is_compiled));
        let later = compile(MOST_COMPILED);
        assert!(!is_compiled(&later));
        assert!(is_compiled(&compile(0)), "an equal one shares what is there");

        assert!(later.is_valid(&json!(MOST_COMPILED)));
        assert!(!later.is_valid(&json!(0)));
        assert!(is_compiled(&later));

        // One that is gone makes room.
        kept.truncate(MOST_COMPILED - 1);
        let early = compile(MOST_COMPILED + 1);
        assert!(is_compiled(&early));
        assert!(!is_compiled(&compile(MOST_COMPILED + 2)));
    }

    #[test]
    fn a_pool_keeps_no_schema_alive() {
        let mut pool = SchemaPool::default();
        let kept = pool.compile(&numbered(0), false).expect("a schema");
        let gone = Arc::downgrade(&pool.compile(&numbered(1), false).expect("a schema").0);
        assert!(gone.upgrade().is_none());
        for number in 2..10_000 {
            pool.compile(&numbered(number), false).expect("a schema");
            assert!(pool.entries <= 65 && pool.known.len() <= pool.entries);
        }
        let again = pool.compile(&numbered(0), false).expect("a schema");
        assert!(Arc::ptr_eq(&kept.0, &again.0));
    }
}
