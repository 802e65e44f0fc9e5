//! What a schema says of itself before it is compiled: where its references lead, how much work it
//! can ask for, which properties are secret.
//!
//! A subschema is *in place* of another when it looks at the same value (`allOf`, `$ref`), and
//! *below* it when it looks at a part of that value (`properties`, `items`). A validator recurses
//! through both, so the two together bound its stack:
//!
//! 1. The document is nested at most [`MOST_NESTED`] deep.
//! 2. No chain of subschemas in place is longer than [`LONGEST_CHAIN`], and none is endless.
//! 3. A value that references may follow is nested at most so deep that chain times depth stays
//!    within [`MOST_FRAMES`]: half of the 2 MiB that a thread of Tokio has, in a debug build.
//!
//! The survey goes where a validator goes: from subschema to subschema by the keywords that have
//! any, and by each reference to whatever it leads to, be that data or a schema of schemas.
//!
//! The same value may be looked at once for each way through the subschemas in place, and four
//! times as often for each `unevaluatedProperties` on that way, so the ways are counted too.

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use serde_json::{Map, Value};

use super::References;
use super::words::is_near;

/// How deep the document of a schema may be nested.
pub(super) const MOST_NESTED: usize = 80;
/// How many subschemas in place of one another a chain may have.
const LONGEST_CHAIN: usize = 60;
/// How often subschemas in place of one may look at one value.
const MOST_LOOKS: usize = 20_000;
/// How many `contains` with `unevaluatedItems` may stand below one another: each doubles the work.
const MOST_DOUBLED: usize = 10;
/// How deep a value may be nested where references follow it down, whatever the chain.
const DEEPEST: usize = 128;
/// How many subschemas may be waiting on the stack.
const MOST_FRAMES: usize = 600;
/// How many subschemas are surveyed, one with several ids around it more than once.
const MOST_SURVEYED: usize = 300_000;

/// What a match that may have to try again adds to the cost of a walk for faults.
const HARD_MATCH: usize = 50;

const IN_PLACE: [&str; 4] = ["not", "if", "then", "else"];
const IN_PLACE_LISTS: [&str; 3] = ["allOf", "anyOf", "oneOf"];
const IN_PLACE_MAPS: [&str; 2] = ["dependentSchemas", "dependencies"];
const REFERENCES: [&str; 3] = ["$ref", "$dynamicRef", "$recursiveRef"];
const BELOW: [&str; 7] = [
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
];
/// Maps of subschemas that hold for a part of a value, or only where something refers to them.
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
const BELOW_LISTS: [&str; 2] = ["prefixItems", "items"];

/// Why a schema is not taken.
#[derive(Debug)]
pub(super) struct Refused {
    /// A JSON pointer into the document.
    pub(super) place: String,
    pub(super) problem: String,
}

/// True when arrays and objects are nested more than `most` deep.
pub(crate) fn is_deeper_than(value: &Value, most: usize) -> bool {
    match value {
        Value::Array(items) => most == 0 || items.iter().any(|item| is_deeper_than(item, most - 1)),
        Value::Object(members) => {
            most == 0 || members.values().any(|member| is_deeper_than(member, most - 1))
        }
        _ => false,
    }
}

/// Takes the cost of each part of a value from what is left; `None` once that is used up.
fn spend(value: &Value, left: &mut usize, cost: fn(&Value) -> usize) -> Option<()> {
    *left = left.checked_sub(cost(value))?;
    match value {
        Value::Array(items) => {
            for item in items {
                spend(item, left, cost)?;
            }
        }
        Value::Object(members) => {
            for member in members.values() {
                spend(member, left, cost)?;
            }
        }
        _ => {}
    }
    Some(())
}

/// True when a value has more than `most` texts, names of properties included.
pub(super) fn has_more_texts_than(value: &Value, mut most: usize) -> bool {
    let texts = |value: &Value| match value {
        Value::String(_) => 1,
        Value::Object(members) => members.len(),
        _ => 0,
    };
    spend(value, &mut most, texts).is_none()
}

/// The place of one part of a document, as a JSON pointer.
pub(super) fn place_of(document: &Value, part: &Value) -> String {
    fn search(value: &Value, part: &Value, place: &mut String) -> bool {
        if std::ptr::eq(value, part) {
            return true;
        }
        let length = place.len();
        let mut enter = |key: &str, child: &Value| {
            place.push('/');
            place.push_str(&key.replace('~', "~0").replace('/', "~1"));
            let found = search(child, part, place);
            if !found {
                place.truncate(length);
            }
            found
        };
        match value {
            Value::Array(items) => {
                items.iter().zip(0..).any(|(item, index)| enter(&i64::to_string(&index), item))
            }
            Value::Object(members) => members.iter().any(|(key, member)| enter(key, member)),
            _ => false,
        }
    }
    let mut place = String::new();
    search(document, part, &mut place);
    place
}

/// The place of a reference whose text says something.
pub(super) fn place_of_reference(document: &Value, says: impl Fn(&str) -> bool) -> Option<String> {
    let mut found = VecDeque::from([document]);
    while let Some(schema) = found.pop_front() {
        let Value::Object(members) = schema else { continue };
        if let Some((key, _)) = references(members).find(|(_, text)| says(text)) {
            return Some(format!("{}/{key}", place_of(document, schema)));
        }
        found.extend(subschemas(members));
    }
    None
}

/// A document nested at most [`MOST_NESTED`] deep, with what its references can lead to.
pub(super) struct Outline<'a> {
    document: &'a Value,
    /// The subschemas that are no booleans, the document first.
    objects: Vec<&'a Value>,
    /// What the references of each lead to.
    targets: HashMap<*const Value, Vec<&'a Value>>,
    /// Those that a reference may lead to instead, depending on the way that led to it.
    dynamic: HashMap<&'a str, Vec<&'a Value>>,
    recursive: Vec<&'a Value>,
    /// A subschema that too many `contains` with `unevaluatedItems` stand around.
    doubled: Option<&'a Value>,
}

impl<'a> Outline<'a> {
    /// The outline of what is no schema.
    pub(super) fn none(document: &'a Value) -> Self {
        Self {
            document,
            objects: Vec::new(),
            targets: HashMap::new(),
            dynamic: HashMap::new(),
            recursive: Vec::new(),
            doubled: None,
        }
    }

    pub(super) fn new(
        document: &'a Value,
        references: &'a References<'_>,
    ) -> Result<Self, Refused> {
        let mut outline = Self::none(document);
        // A subschema is read by the ids around it, and a reference may lead past these: so one may
        // be read in several ways, and all of them count.
        let mut seen = HashMap::new();
        let start = references.home_of(document, references.start());
        let mut ahead: VecDeque<_> = start.map(|home| (document, home, 0)).into_iter().collect();
        while let Some((object, home, doubled)) = ahead.pop_front() {
            let Value::Object(members) = object else { continue };
            let known = seen.insert((std::ptr::from_ref(object), home.clone()), doubled);
            if known.is_some_and(|known| known >= doubled) {
                continue;
            }
            if seen.len() > MOST_SURVEYED {
                let problem = format!("it has more than {MOST_SURVEYED} subschemas");
                return Err(Refused { place: String::new(), problem });
            }
            outline.add(object, members);
            let both = members.contains_key("contains") && members.contains_key("unevaluatedItems");
            let doubled = doubled + usize::from(both);
            if doubled > MOST_DOUBLED {
                outline.doubled = Some(object);
                break;
            }
            for below in subschemas(members) {
                ahead.extend(references.home_of(below, &home).map(|home| (below, home, doubled)));
            }
            for (keyword, reference) in self::references(members) {
                let reference = if keyword == "$recursiveRef" { "#" } else { reference };
                let Some((target, home)) = references.follow(reference, &home) else { continue };
                let targets = outline.targets.entry(object).or_default();
                if !targets.iter().any(|known| std::ptr::eq(*known, target)) {
                    targets.push(target);
                }
                // A schema of schemas is none of the document's own: its anchors are known only
                // when the whole of it is.
                if !reference.starts_with('#') {
                    ahead.extend(references.follow("#", &home).map(|(all, home)| (all, home, 0)));
                }
                ahead.push_back((target, home, 0));
            }
        }
        Ok(outline)
    }

    fn add(&mut self, object: &'a Value, members: &'a Map<String, Value>) {
        if self.targets.contains_key(&std::ptr::from_ref(object)) {
            return;
        }
        self.targets.insert(object, Vec::new());
        self.objects.push(object);
        if let Some(anchor) = members.get("$dynamicAnchor").and_then(Value::as_str) {
            self.dynamic.entry(anchor).or_default().push(object);
        }
        if members.get("$recursiveAnchor") == Some(&Value::Bool(true)) {
            self.recursive.push(object);
        }
    }

    /// What the references of a subschema can lead to.
    fn targets(&self, object: &'a Value, members: &'a Map<String, Value>) -> Vec<&'a Value> {
        let sure = self.targets.get(&std::ptr::from_ref(object)).map_or(&[][..], Vec::as_slice);
        let mut targets = sure.to_vec();
        for (keyword, reference) in references(members) {
            let name = reference.rsplit_once('#').map_or("", |(_, name)| name);
            let others = match keyword {
                "$recursiveRef" => Some(&self.recursive),
                _ => self.dynamic.get(name),
            };
            let is_new = |other: &&&Value| !sure.iter().any(|known| std::ptr::eq(*known, **other));
            targets.extend(others.into_iter().flatten().filter(is_new));
        }
        targets
    }

    /// The subschemas in place of one.
    fn in_place(&self, object: &'a Value) -> Vec<&'a Value> {
        let Value::Object(members) = object else { return Vec::new() };
        let mut found: Vec<&Value> = Vec::new();
        found.extend(IN_PLACE.iter().filter_map(|key| members.get(*key)));
        for key in IN_PLACE_LISTS {
            found.extend(members.get(key).and_then(Value::as_array).into_iter().flatten());
        }
        for key in IN_PLACE_MAPS {
            let map = members.get(key).and_then(Value::as_object);
            found.extend(map.into_iter().flat_map(Map::values));
        }
        found.extend(self.targets(object, members));
        found.retain(|subschema| subschema.is_object());
        found
    }

    /// The subschemas below one that hold for any part of the value.
    fn below(object: &'a Value) -> Vec<&'a Value> {
        let Value::Object(members) = object else { return Vec::new() };
        let mut found: Vec<&Value> = Vec::new();
        for part in BELOW.iter().filter_map(|key| members.get(*key)) {
            match part {
                Value::Array(items) => found.extend(items),
                part => found.push(part),
            }
        }
        found.extend(members.get("prefixItems").and_then(Value::as_array).into_iter().flatten());
        let patterns = members.get("patternProperties").and_then(Value::as_object);
        found.extend(patterns.into_iter().flat_map(Map::values));
        found.retain(|subschema| subschema.is_object());
        found
    }

    /// Checks that a validator of the document stays within its bounds. Gives how deep a value may
    /// be nested, where that matters.
    pub(super) fn deepest(&self) -> Result<Option<usize>, Refused> {
        let refuse = |part: &Value, problem: &str| {
            let place = place_of(self.document, part);
            Err(Refused { place, problem: problem.to_owned() })
        };
        if let Some(part) = self.doubled {
            return refuse(part, "too many `contains` with `unevaluatedItems` in one another");
        }
        let mut chains = Chains { outline: self, known: HashMap::new() };
        let mut longest = 1;
        for object in &self.objects {
            let chain = match chains.of(object, 0) {
                Ok(chain) => chain,
                Err(problem) => return refuse(object, problem),
            };
            if chain.looks > MOST_LOOKS {
                return refuse(
                    object,
                    "its `$ref`s, `allOf`s and the like lead to the same value in too many ways",
                );
            }
            longest = longest.max(chain.length);
        }
        let follows = self.objects.iter().filter_map(|object| object.as_object()).any(|members| {
            references(members).next().is_some() || members.get("uniqueItems") == Some(&true.into())
        });
        Ok(follows.then(|| DEEPEST.min(MOST_FRAMES / longest)))
    }

    /// How many patterns may look around or back, so that they may have to try again.
    pub(super) fn hard_patterns(&self) -> usize {
        let patterns = self.objects.iter().flat_map(|object| {
            let names = object["patternProperties"].as_object().into_iter().flat_map(Map::keys);
            names.map(String::as_str).chain(object["pattern"].as_str())
        });
        patterns.filter(|pattern| is_hard(pattern)).count()
    }

    /// The properties that a subschema and those in place of it name.
    pub(super) fn properties(&self, object: &'a Value) -> Vec<&'a str> {
        let mut names: Vec<&str> = Vec::new();
        for object in self.with_in_place(object) {
            let properties = object["properties"].as_object();
            for name in properties.into_iter().flat_map(Map::keys) {
                if !names.contains(&name.as_str()) && names.len() < 200 {
                    names.push(name);
                }
            }
        }
        names
    }

    /// The patterns of names that a subschema and those in place of it allow.
    pub(super) fn patterns(&self, object: &'a Value) -> Vec<&'a str> {
        let objects = self.with_in_place(object);
        let patterns = objects.iter().filter_map(|object| object["patternProperties"].as_object());
        patterns.flat_map(Map::keys).map(String::as_str).collect()
    }

    fn with_in_place(&self, object: &'a Value) -> Vec<&'a Value> {
        let mut found = vec![object];
        let mut next = 0;
        while let Some(object) = found.get(next).copied() {
            for other in self.in_place(object) {
                if found.len() < 200 && !found.iter().any(|known| std::ptr::eq(*known, other)) {
                    found.push(other);
                }
            }
            next += 1;
        }
        found
    }

    /// What must not be shown.
    pub(super) fn secrets(&self) -> Secrets<'a> {
        let mut secrets = Secrets::none();
        if !self.objects.iter().any(|object| says_secret(object)) {
            return secrets;
        }
        secrets.all = self.is_secret(self.document);
        for object in &self.objects {
            let properties = object["properties"].as_object();
            for (name, subschema) in properties.into_iter().flatten() {
                secrets.declared.insert(name);
                if self.is_secret(subschema) {
                    secrets.names.insert(name);
                }
            }
        }
        secrets
    }

    /// A subschema, one in place of it or one below it that no property of its own leads to says
    /// that its value is secret.
    fn is_secret(&self, subschema: &'a Value) -> bool {
        let mut seen: HashSet<*const Value> = HashSet::new();
        let mut found = vec![subschema];
        while let Some(object) = found.pop() {
            if says_secret(object) {
                return true;
            }
            if seen.insert(object) {
                found.extend(self.in_place(object));
                found.extend(Self::below(object));
            }
        }
        false
    }

    /// True when a walk for the first fault may have to take several ways.
    pub(super) fn branches(&self) -> bool {
        self.objects.iter().filter_map(|object| object.as_object()).any(|members| {
            ["anyOf", "oneOf"].iter().any(|key| members.contains_key(*key))
                || references(members).next().is_some()
        })
    }

    /// True when telling all that is wrong with a value costs more than `most`: a walk for faults
    /// takes every way through the subschemas, and copies what stands under `anyOf` and `oneOf`.
    pub(super) fn costs_more_than(&self, most: usize, value: &Value) -> bool {
        let mut walk =
            Walk { outline: self, left: most, waiting: 0, path: 0, in_place: HashMap::new() };
        walk.pay(self.document, value, false).is_none()
    }
}

/// True for every pattern that looks around or back, and for a few others.
fn is_hard(pattern: &str) -> bool {
    let looks_around = ["(?=", "(?!", "(?<", "(?>"].iter().any(|group| pattern.contains(group));
    let follows = |character: char| character == 'k' || matches!(character, '1'..='9');
    looks_around || pattern.split('\\').skip(1).any(|rest| rest.starts_with(follows))
}

/// Whether a subschema says of its value that it must not be shown.
pub(crate) fn says_secret(subschema: &Value) -> bool {
    let format = subschema["format"].as_str().unwrap_or_default();
    subschema["writeOnly"] == true || format.eq_ignore_ascii_case("password")
}

/// The references of a subschema, with the keyword of each.
fn references(members: &Map<String, Value>) -> impl Iterator<Item = (&'static str, &str)> {
    REFERENCES.iter().filter_map(|key| Some((*key, members.get(*key)?.as_str()?)))
}

/// The subschemas that stand in one, by the keywords of all drafts.
fn subschemas(members: &Map<String, Value>) -> Vec<&Value> {
    let mut found: Vec<&Value> = Vec::new();
    for (key, value) in members {
        let is_of = |keys: &[&str]| keys.contains(&key.as_str());
        match value {
            Value::Object(map) if is_of(&MAPS) || is_of(&IN_PLACE_MAPS) => {
                found.extend(map.values());
            }
            Value::Array(items) if is_of(&IN_PLACE_LISTS) || is_of(&BELOW_LISTS) => {
                found.extend(items);
            }
            Value::Object(_) if is_of(&IN_PLACE) || is_of(&BELOW) || key == "contentSchema" => {
                found.push(value);
            }
            _ => {}
        }
    }
    found.retain(|subschema| subschema.is_object());
    found
}

/// The subschemas in place of one.
#[derive(Clone, Copy)]
struct Chain {
    /// How many follow one another at most, the one included.
    length: usize,
    /// How often they look at one value.
    looks: usize,
}

struct Chains<'a> {
    outline: &'a Outline<'a>,
    /// `None` while it is being followed.
    known: HashMap<*const Value, Option<Chain>>,
}

impl<'a> Chains<'a> {
    fn of(&mut self, object: &'a Value, before: usize) -> Result<Chain, &'static str> {
        match self.known.get(&std::ptr::from_ref(object)) {
            Some(Some(chain)) => return Ok(*chain),
            Some(None) => return Err("its references lead back to itself, to the same value"),
            None if before >= LONGEST_CHAIN => {
                return Err("its `$ref`s, `allOf`s and the like lead on to one another too often");
            }
            None => {}
        }
        self.known.insert(object, None);
        let mut chain = Chain { length: 1, looks: 1 };
        for other in self.outline.in_place(object) {
            let other = self.of(other, before + 1)?;
            chain.length = chain.length.max(other.length + 1);
            chain.looks = chain.looks.saturating_add(other.looks);
        }
        if chain.length > LONGEST_CHAIN {
            return Err("its `$ref`s, `allOf`s and the like lead on to one another too often");
        }
        let unevaluated = ["unevaluatedProperties", "unevaluatedItems"];
        if unevaluated.iter().any(|key| object.get(key).is_some()) {
            chain.looks = chain.looks.saturating_mul(4);
        }
        self.known.insert(object, Some(chain));
        Ok(chain)
    }
}

/// A walk that only counts what a walk for faults would do. What stands under `not`, `if` and
/// `contains` is not told, so nothing is walked there.
struct Walk<'a> {
    outline: &'a Outline<'a>,
    left: usize,
    /// How many subschemas are being walked, and how long the path to their value is: each fault
    /// has a copy of it.
    waiting: usize,
    path: usize,
    in_place: HashMap<*const Value, Rc<[&'a Value]>>,
}

impl<'a> Walk<'a> {
    /// `None` when there was not enough left, of the stack too.
    fn pay(&mut self, object: &'a Value, value: &Value, copied: bool) -> Option<()> {
        let Value::Object(members) = object else { return Some(()) };
        if self.waiting > MOST_FRAMES + MOST_NESTED {
            return None;
        }
        self.waiting += 1;
        let size = if copied { self.size_of(value)? } else { 0 } + self.path / 256;
        self.spend(members.len().max(1).saturating_mul(1 + size))?;
        if value.is_string() && object["pattern"].as_str().is_some_and(is_hard) {
            self.spend(HARD_MATCH)?;
        }

        let branches = ["anyOf", "oneOf"].iter().any(|key| members.contains_key(*key));
        for other in &*self.in_place(object) {
            self.pay(other, value, copied || branches)?;
        }
        match value {
            Value::Array(items) => {
                let prefix =
                    ["prefixItems", "items"].iter().find_map(|key| members.get(*key)?.as_array());
                for (index, item) in items.iter().enumerate() {
                    self.spend(1)?;
                    if let Some(below) = prefix.and_then(|prefix| prefix.get(index)) {
                        self.pay(below, item, copied)?;
                    }
                    for key in ["items", "additionalItems", "unevaluatedItems"] {
                        if let Some(below) = members.get(key) {
                            self.pay(below, item, copied)?;
                        }
                    }
                }
            }
            Value::Object(parts) => {
                let [properties, patterns] = ["properties", "patternProperties"]
                    .map(|key| members.get(key).and_then(Value::as_object));
                let path = self.path;
                for (name, part) in parts {
                    self.spend(1)?;
                    self.path = path + name.len();
                    for below in patterns.into_iter().flat_map(Map::values) {
                        self.pay(below, part, copied)?;
                    }
                    if let Some(below) = properties.and_then(|properties| properties.get(name)) {
                        self.pay(below, part, copied)?;
                        continue;
                    }
                    for key in ["additionalProperties", "unevaluatedProperties"] {
                        if let Some(below) = members.get(key) {
                            self.pay(below, part, copied)?;
                        }
                    }
                }
                self.path = path;
            }
            _ => {}
        }
        self.waiting -= 1;
        Some(())
    }

    fn spend(&mut self, amount: usize) -> Option<()> {
        self.left = self.left.checked_sub(amount)?;
        Some(())
    }

    fn in_place(&mut self, object: &'a Value) -> Rc<[&'a Value]> {
        let known = self.in_place.entry(object).or_insert_with(|| {
            let untold = ["not", "if"].map(|key| object.get(key).map(std::ptr::from_ref));
            let mut found = self.outline.in_place(object);
            found.retain(|other| !untold.contains(&Some(std::ptr::from_ref(*other))));
            found.into()
        });
        Rc::clone(known)
    }

    /// How much a copy of a value takes, counting at most what is left.
    fn size_of(&self, value: &Value) -> Option<usize> {
        let cost = |value: &Value| match value {
            Value::String(text) => 1 + text.len() / 64,
            _ => 1,
        };
        let mut left = self.left;
        spend(value, &mut left, cost)?;
        Some(self.left - left)
    }
}

/// What of a value must not be shown.
pub(super) struct Secrets<'a> {
    /// Nothing may be shown.
    all: bool,
    /// The properties whose value is secret, wherever they stand.
    names: HashSet<&'a str>,
    /// The properties that the document names.
    declared: HashSet<&'a str>,
}

impl Secrets<'_> {
    pub(super) fn none() -> Self {
        Self { all: false, names: HashSet::new(), declared: HashSet::new() }
    }

    pub(super) fn any(&self) -> bool {
        self.all || !self.names.is_empty()
    }

    /// A place in a value, and whether what stands there is secret. Below a secret the names that
    /// are not the schema's own are hidden: a number is one, but for an index.
    pub(super) fn cover(&self, value: &Value, place: &str) -> (String, bool) {
        let mut secret = self.all;
        let mut shown = String::new();
        let mut above = Some(value);
        for segment in place.split('/').skip(1) {
            let name = segment.replace("~1", "/").replace("~0", "~");
            let is_index = above.is_some_and(Value::is_array);
            let known = is_index || self.declared.contains(name.as_str());
            shown.push('/');
            shown.push_str(if secret && !known { "(hidden)" } else { segment });
            secret |= self.is_like_a_secret(&name);
            above = above.and_then(|above| match above {
                Value::Array(items) => items.get(name.parse::<usize>().ok()?),
                other => other.get(&name),
            });
        }
        (shown, secret)
    }

    /// A name that a secret one was misspelt as counts as one.
    fn is_like_a_secret(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        self.names.iter().any(|secret| {
            let secret = secret.to_lowercase();
            name == secret || (secret.len() >= 5 && is_near(&name, &secret))
        })
    }
}
