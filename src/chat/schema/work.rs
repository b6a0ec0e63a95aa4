//! How much a compiler makes of schemas: parts that stand beside each other multiply.
//!
//! It goes the way of llguidance 1.9, `json/schema.rs`, and counts instead of copying. Of `anyOf`, `oneOf` and
//! `enum` each option is merged with all that stands beside it; a `$ref` is only followed into what
//! stands beside something; objects that are merged have each other's properties. Whether two parts
//! could be true at once is not asked, so what is counted is what there is at most.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{MAX_DEPTH, MAX_PARTS, MAX_PATTERNS, MAX_PROPERTIES, SchemaError};

/// Parts that a pattern or a range of numbers is worth, measured: automata are made of it.
const PATTERN: usize = 20;
/// Parts that two patterns for names are worth: they are told from each other.
const PATTERN_PAIR: usize = 4;
/// Parts that two optional properties are worth where a number of them is asked for.
const COUNTED_PAIR: usize = 4;
/// Pairs of parts of `oneOf` that are worth one part: each option is told from each, with all that is in it, and
/// once more for all that it stands beside.
const ONE_OF_PAIRS: usize = 1 << 14;

/// What was counted.
#[derive(Debug, Default)]
pub(super) struct Work {
    parts: usize,
}

/// Something that holds beside others.
#[derive(Debug, Clone, Copy)]
enum Part<'a> {
    Schema(&'a Value),
    /// A schema without `$ref`, `allOf` and options, which are parts of their own.
    Plain(&'a Map<String, Value>),
    Const(&'a Value),
    /// One of these schemas.
    AnyOf(&'a [Value]),
    /// The same, of which no two may hold.
    OneOf(&'a [Value]),
    /// One of these values.
    Enum(&'a [Value]),
}

impl Work {
    /// Adds a schema and its definitions, `#/$defs/<name>`.
    pub(super) fn count(
        &mut self,
        schema: &Value,
        definitions: &Map<String, Value>,
    ) -> Result<(), SchemaError> {
        let mut counter = Counter {
            definitions,
            parts: &mut self.parts,
        };
        for schema in definitions.values().chain([schema]) {
            counter.merge(vec![Part::Schema(schema)], 0)?;
        }
        Ok(())
    }
}

struct Counter<'a, 'w> {
    definitions: &'a Map<String, Value>,
    parts: &'w mut usize,
}

impl<'a> Counter<'a, '_> {
    fn spend(&mut self, parts: usize) -> Result<(), SchemaError> {
        *self.parts = self.parts.saturating_add(parts);
        if *self.parts > MAX_PARTS {
            return Err(SchemaError::TooManyParts {
                parts: *self.parts,
                limit: MAX_PARTS,
            });
        }
        Ok(())
    }

    /// Counts what comes of parts that all hold for one value.
    fn merge(&mut self, parts: Vec<Part<'a>>, depth: usize) -> Result<(), SchemaError> {
        if depth > MAX_DEPTH {
            return Err(SchemaError::TooDeep { limit: MAX_DEPTH });
        }
        let mut queue = parts;
        let mut references = Vec::new();
        let mut options = Vec::new();
        let mut single = Vec::new();
        let mut held = 0;
        loop {
            while let Some(part) = queue.pop() {
                self.spend(1)?;
                held += 1;
                match part {
                    Part::Schema(Value::Object(fields)) => {
                        split(fields, &mut queue, &mut references, &mut single);
                    }
                    Part::Schema(_) => {}
                    Part::AnyOf(_) | Part::OneOf(_) | Part::Enum(_) => options.push(part),
                    Part::Plain(_) | Part::Const(_) => single.push(part),
                }
            }
            // A reference that stands alone stays one.
            if references.len() == 1 && options.is_empty() && single.is_empty() {
                return Ok(());
            }
            let Some(reference) = references.pop() else {
                break;
            };
            let name = Value::as_str(reference).and_then(|text| text.strip_prefix("#/$defs/"));
            if let Some(target) = name.and_then(|name| self.definitions.get(name)) {
                queue.push(Part::Schema(target));
            }
        }
        match options.pop() {
            Some(part @ (Part::AnyOf(schemas) | Part::OneOf(schemas))) => {
                let before = *self.parts;
                for schema in schemas {
                    let beside = single.iter().chain(&options).copied();
                    self.merge(beside.chain([Part::Schema(schema)]).collect(), depth + 1)?;
                }
                let made = *self.parts - before;
                match part {
                    Part::OneOf(_) => self.spend(made * made / ONE_OF_PAIRS * held),
                    _ => Ok(()),
                }
            }
            Some(Part::Enum(values)) => {
                // Most are scalars beside a type.
                let is_plain = options.is_empty() && single.iter().all(|part| !has_pattern(*part));
                for value in values {
                    if is_plain && !value.is_array() && !value.is_object() {
                        self.spend(1)?;
                        continue;
                    }
                    let beside = single.iter().chain(&options).copied();
                    self.merge(beside.chain([Part::Const(value)]).collect(), depth + 1)?;
                }
                Ok(())
            }
            _ => self.inside(&single, depth),
        }
    }

    /// Counts what is inside values for which all of `parts` hold.
    fn inside(&mut self, parts: &[Part<'a>], depth: usize) -> Result<(), SchemaError> {
        let patterns = parts.iter().filter(|part| has_pattern(**part)).count();
        self.spend(patterns * PATTERN)?;
        self.properties(parts, depth)?;
        self.items(parts, depth)
    }

    fn properties(&mut self, parts: &[Part<'a>], depth: usize) -> Result<(), SchemaError> {
        let mut names: BTreeSet<&str> = BTreeSet::new();
        let mut patterns: BTreeSet<&str> = BTreeSet::new();
        let mut is_counted = false;
        for part in parts {
            names.extend(
                part.fields("properties")
                    .into_iter()
                    .flatten()
                    .map(|(name, _)| name.as_str()),
            );
            self.spend(part.list("required").len() / 8)?;
            names.extend(part.list("required").iter().filter_map(Value::as_str));
            let own = part.fields("patternProperties").into_iter().flatten();
            patterns.extend(own.map(|(pattern, _)| pattern.as_str()));
            is_counted |= ["minProperties", "maxProperties"]
                .iter()
                .any(|key| part.get(key).is_some());
        }
        if names.len() > MAX_PROPERTIES {
            return Err(SchemaError::TooManyProperties {
                properties: names.len(),
                limit: MAX_PROPERTIES,
            });
        }
        if patterns.len() > MAX_PATTERNS {
            return Err(SchemaError::TooManyPatterns {
                patterns: patterns.len(),
                limit: MAX_PATTERNS,
            });
        }
        let pairs = patterns.len() * patterns.len() / 2;
        self.spend(
            patterns.len() * PATTERN + pairs * PATTERN_PAIR + names.len() * patterns.len() / 8,
        )?;
        if is_counted {
            self.spend(names.len() * names.len() * COUNTED_PAIR)?;
        }
        for name in names {
            self.spend(1)?;
            let children = parts.iter().filter_map(|part| {
                let named = part.fields("properties").and_then(|named| named.get(name));
                named
                    .map(|child| part.child(child))
                    .or_else(|| part.other_property())
            });
            self.merge(children.collect(), depth + 1)?;
        }
        for pattern in patterns {
            let children = parts.iter().filter_map(|part| {
                let matching = part
                    .fields("patternProperties")
                    .and_then(|own| own.get(pattern));
                let child = matching.or_else(|| part.get("additionalProperties"));
                child.map(Part::Schema)
            });
            self.merge(children.collect(), depth + 1)?;
        }
        let others: Vec<Part<'a>> = parts
            .iter()
            .filter_map(|part| part.get("additionalProperties").map(Part::Schema))
            .collect();
        if others.is_empty() {
            return Ok(());
        }
        self.merge(others, depth + 1)
    }

    fn items(&mut self, parts: &[Part<'a>], depth: usize) -> Result<(), SchemaError> {
        let first = parts.iter().map(|part| part.first_items().len()).max();
        for at in 0..first.unwrap_or(0) {
            let children = parts.iter().filter_map(|part| {
                let child = part.first_items().get(at).map(|child| part.child(child));
                child.or_else(|| part.other_items())
            });
            self.merge(children.collect(), depth + 1)?;
        }
        let others: Vec<Part<'a>> = parts.iter().filter_map(|part| part.other_items()).collect();
        if others.is_empty() {
            return Ok(());
        }
        self.merge(others, depth + 1)
    }
}

/// Takes a schema apart.
fn split<'a>(
    fields: &'a Map<String, Value>,
    queue: &mut Vec<Part<'a>>,
    references: &mut Vec<&'a Value>,
    single: &mut Vec<Part<'a>>,
) {
    let mut is_plain = false;
    for (key, value) in fields {
        let several = || value.as_array().map(Vec::as_slice).unwrap_or_default();
        match key.as_str() {
            "$ref" => references.push(value),
            "allOf" => queue.extend(several().iter().map(Part::Schema)),
            "anyOf" => queue.push(Part::AnyOf(several())),
            "oneOf" => queue.push(Part::OneOf(several())),
            "enum" => queue.push(Part::Enum(several())),
            "const" => single.push(Part::Const(value)),
            "$schema" => {}
            _ => is_plain = true,
        }
    }
    if is_plain {
        single.push(Part::Plain(fields));
    }
}

impl<'a> Part<'a> {
    fn get(self, key: &str) -> Option<&'a Value> {
        match self {
            Self::Plain(fields) => fields.get(key),
            _ => None,
        }
    }

    fn list(self, key: &str) -> &'a [Value] {
        let list = self.get(key).and_then(Value::as_array);
        list.map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns what stands by name under a keyword; the fields of a constant are its properties.
    fn fields(self, key: &str) -> Option<&'a Map<String, Value>> {
        match self {
            Self::Const(value) if key == "properties" => value.as_object(),
            _ => self.get(key)?.as_object(),
        }
    }

    /// Returns what is inside a constant or a schema as the same.
    fn child(self, child: &'a Value) -> Self {
        match self {
            Self::Const(_) => Self::Const(child),
            _ => Self::Schema(child),
        }
    }

    /// Returns what a property without a schema of its own must be: the largest of what it may be.
    fn other_property(self) -> Option<Self> {
        let patterns = self.fields("patternProperties").into_iter().flatten();
        let patterns = patterns.map(|(_, schema)| schema);
        let largest = patterns
            .chain(self.get("additionalProperties"))
            .max_by_key(|schema| super::values(schema));
        largest.map(Part::Schema)
    }

    /// Returns what the first items of a list must be, one by one.
    fn first_items(self) -> &'a [Value] {
        match self {
            Self::Const(Value::Array(items)) => items,
            _ => match self.get("items") {
                Some(Value::Array(items)) => items,
                _ => self.list("prefixItems"),
            },
        }
    }

    fn other_items(self) -> Option<Self> {
        let items = match self.get("items") {
            Some(Value::Array(_)) | None => self.get("additionalItems"),
            items => items,
        };
        items.map(Part::Schema)
    }
}

/// Returns whether an automaton is made of what the part says.
fn has_pattern(part: Part<'_>) -> bool {
    let costly = [
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ];
    costly.iter().any(|key| part.get(key).is_some())
}
