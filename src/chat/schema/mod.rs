//! JSON schemas from outside: what they refer to, and how much work they are.
//!
//! Who compiles a schema bounds the automata that come of it, but neither its recursion nor the copies
//! that it makes where one schema stands beside another. So all schemas of a grammar go through
//! [`Schemas`] first: what is too large is refused there, with what was found and the limit.

mod document;
mod work;

use std::collections::BTreeSet;

use serde_json::{Map, Value};

pub(super) use document::{Document, Kinds, Written};
use work::Work;

/// Most JSON values of all schemas of a grammar. Each may be a step of recursion, which takes 6 KiB of stack
/// in `engine::guide`.
const MAX_VALUES: usize = 20_000;
/// Most places of one schema that `$ref` leads to.
const MAX_TARGETS: usize = 500;
/// Most properties of one object: they are written in a row, by a recursion.
const MAX_PROPERTIES: usize = 500;
/// Most patterns of one object's names: each is compared with each.
const MAX_PATTERNS: usize = 32;
/// Most parts of the grammar that all schemas make together. One takes 0.05 to 0.2 ms.
const MAX_PARTS: usize = 20_000;
/// How deeply schemas that stand beside each other are merged.
const MAX_DEPTH: usize = 100;

/// A schema that no answer can be held to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// `$ref` leads nowhere, or out of the schema.
    #[error("`$ref` leads to `{reference}`, which is not within the schema")]
    UnknownReference {
        /// What it says.
        reference: String,
    },
    /// The schemas are too long.
    #[error(
        "the schemas of a request may have {limit} JSON values, and these have {values} or more"
    )]
    TooManyValues {
        /// How many were read.
        values: usize,
        /// The most.
        limit: usize,
    },
    /// Too many definitions.
    #[error("`$ref` may lead to {limit} places, and it leads to {targets} or more")]
    TooManyTargets {
        /// How many were found.
        targets: usize,
        /// The most.
        limit: usize,
    },
    /// An object with too many properties.
    #[error("an object may have {limit} properties, and one has {properties}")]
    TooManyProperties {
        /// How many it has.
        properties: usize,
        /// The most.
        limit: usize,
    },
    /// An object with too many patterns for names.
    #[error("an object may have {limit} `patternProperties`, and one has {patterns}")]
    TooManyPatterns {
        /// How many it has.
        patterns: usize,
        /// The most.
        limit: usize,
    },
    /// What stands beside each other multiplies to too much.
    #[error(
        "the schemas of a request may come to {limit} parts, and these come to {parts} or more: what \
         stands beside `anyOf`, `oneOf`, `enum` or `$ref` counts once for each option"
    )]
    TooManyParts {
        /// How many were counted.
        parts: usize,
        /// The most.
        limit: usize,
    },
    /// Schemas that are merged are nested too deeply, or without end.
    #[error(
        "schemas that stand beside each other may be {limit} levels deep; a `$ref` that leads back to \
         itself must stand alone"
    )]
    TooDeep {
        /// The most levels.
        limit: usize,
    },
    /// A name that the model's format of calls cannot write.
    #[error(
        "calls of this model cannot spell the name `{name}`: it must be one word without `<`, `>`, `=` or quotes"
    )]
    UnwritableName {
        /// The name.
        name: String,
    },
    /// A strict schema says what the model's format of calls cannot be held to.
    #[error("`{keyword}` of the arguments as a whole cannot be enforced in calls of this model")]
    NotEnforced {
        /// What says it.
        keyword: String,
    },
}

/// Keywords whose value is a schema, or a list of them.
const OF_ONE: [&str; 12] = [
    "additionalProperties",
    "additionalItems",
    "items",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "prefixItems",
];
/// Keywords whose value is a list of schemas.
const OF_SEVERAL: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords whose value has schemas by name.
const BY_NAME: [&str; 4] = [
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
];
/// Keywords whose value is no schema.
const OF_NONE: [&str; 24] = [
    "$schema",
    "const",
    "enum",
    "required",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minContains",
    "maxContains",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "$recursiveRef",
    "$dynamicRef",
    "$dynamicAnchor",
];

/// Returns whether a keyword says what a value must be; others are notes.
pub(super) fn is_keyword(key: &str) -> bool {
    key == "$ref"
        || key == "type"
        || [&OF_ONE[..], &OF_SEVERAL, &BY_NAME, &OF_NONE[1..]]
            .iter()
            .any(|known| known.contains(&key))
}

/// The schemas of one grammar.
#[derive(Debug, Default)]
pub(super) struct Schemas {
    values: usize,
    work: Work,
}

impl Schemas {
    /// Returns `schema`, which is a part of `document`, as one that stands by itself: what it refers to is
    /// in its `$defs`, under names without a meaning. Notes and unknown keywords are left out.
    ///
    /// # Errors
    ///
    /// Fails if a `$ref` leads nowhere, or if it and those before are more than a limit.
    pub(super) fn add(
        &mut self,
        document: &Document<'_>,
        schema: &Value,
    ) -> Result<Value, SchemaError> {
        let mut copier = Copier {
            document,
            targets: Vec::new(),
            values: &mut self.values,
        };
        let mut copy = copier.schema(schema)?;
        let mut definitions = Map::new();
        while let Some(&target) = copier.targets.get(definitions.len()) {
            let definition = copier.schema(target)?;
            definitions.insert(definitions.len().to_string(), definition);
        }
        self.work.count(&copy, &definitions)?;
        if let Some(fields) = copy.as_object_mut()
            && !definitions.is_empty()
        {
            fields.insert("$defs".to_owned(), Value::Object(definitions));
        }
        Ok(copy)
    }
}

/// Copies schemas of one document.
struct Copier<'a, 'd> {
    document: &'d Document<'a>,
    /// What `$ref` leads to.
    targets: Vec<&'a Value>,
    values: &'d mut usize,
}

impl Copier<'_, '_> {
    fn schema(&mut self, schema: &Value) -> Result<Value, SchemaError> {
        let Some(fields) = schema.as_object() else {
            return self.value(schema);
        };
        self.read(1)?;
        let mut copy = Map::new();
        for (key, value) in fields {
            let value = match (key.as_str(), value) {
                ("$ref", Value::String(reference)) => self.reference(reference)?,
                ("type", Value::Array(types)) => {
                    self.read(values(value))?;
                    let mut seen = BTreeSet::new();
                    let types = types.iter().filter(|kind| seen.insert(kind.as_str()));
                    types.cloned().collect()
                }
                (key, Value::Array(schemas))
                    if OF_ONE.contains(&key) || OF_SEVERAL.contains(&key) =>
                {
                    self.read(1)?;
                    let copies = schemas.iter().map(|schema| self.schema(schema));
                    copies.collect::<Result<Value, _>>()?
                }
                (key, value) if OF_ONE.contains(&key) => self.schema(value)?,
                (key, Value::Object(schemas)) if BY_NAME.contains(&key) => {
                    self.read(1)?;
                    let copies = schemas
                        .iter()
                        .map(|(name, schema)| Ok((name.clone(), self.schema(schema)?)));
                    Value::Object(copies.collect::<Result<_, SchemaError>>()?)
                }
                (key, value) if is_keyword(key) || key == "$schema" => self.value(value)?,
                _ => continue,
            };
            copy.insert(key.clone(), value);
        }
        Ok(Value::Object(copy))
    }

    fn reference(&mut self, reference: &str) -> Result<Value, SchemaError> {
        let target = self.document.resolve(reference);
        let target = target.ok_or_else(|| SchemaError::UnknownReference {
            reference: reference.chars().take(200).collect(),
        })?;
        let known = self
            .targets
            .iter()
            .position(|&known| std::ptr::eq(known, target));
        let at = known.unwrap_or(self.targets.len());
        if known.is_none() {
            self.targets.push(target);
        }
        if self.targets.len() > MAX_TARGETS {
            return Err(SchemaError::TooManyTargets {
                targets: self.targets.len(),
                limit: MAX_TARGETS,
            });
        }
        self.read(1)?;
        Ok(Value::from(format!("#/$defs/{at}")))
    }

    fn value(&mut self, value: &Value) -> Result<Value, SchemaError> {
        self.read(values(value))?;
        Ok(value.clone())
    }

    fn read(&mut self, values: usize) -> Result<(), SchemaError> {
        *self.values += values;
        if *self.values > MAX_VALUES {
            return Err(SchemaError::TooManyValues {
                values: *self.values,
                limit: MAX_VALUES,
            });
        }
        Ok(())
    }
}

/// Returns how many values there are in a value, itself included.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(values).sum(),
        Value::Object(fields) => fields.values().map(values).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
