//! Reading the fields of a row, with errors that name file, row and field.

use std::path::Path;

use serde_json::{Map, Value};

use super::TaskError;
use super::rows::json_type;
use crate::grader::GRADERS;

/// A row with its place, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    /// The file.
    pub(super) path: &'a Path,
    /// The row, counted from 1.
    pub(super) row: u64,
    fields: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(path: &'a Path, row: u64, fields: &'a Map<String, Value>) -> Self {
        Self { path, row, fields }
    }

    /// Returns whether there is such a field, and it is not null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|value| !value.is_null())
    }

    /// Returns the whole row.
    pub(super) fn all(&self) -> &'a Map<String, Value> {
        self.fields
    }

    /// Returns a field, whatever it is.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Says that a grader does not exist.
    pub(super) fn unknown_grader(&self, name: &str) -> TaskError {
        TaskError::UnknownGrader {
            path: self.path.to_owned(),
            row: self.row,
            name: name.to_owned(),
            known: GRADERS.map(|name| format!("`{name}`")).join(", "),
        }
    }

    /// Returns the id that the row gives in `key`.
    pub(super) fn id(&self, key: &'static str) -> Result<String, TaskError> {
        match self.fields.get(key) {
            Some(Value::String(id)) if id.is_empty() => Err(self.empty(key)),
            Some(Value::String(id)) => Ok(id.clone()),
            Some(Value::Number(id)) if id.is_i64() || id.is_u64() => Ok(id.to_string()),
            Some(other) => Err(self.wrong(key, "a whole number or a string", other)),
            None => Err(self.missing(key, "give each row its own number or name")),
        }
    }

    /// Returns the id that the row gives in `key`, or its number where it gives none.
    pub(super) fn id_or_row(&self, key: &'static str) -> Result<String, TaskError> {
        if self.has(key) {
            self.id(key)
        } else {
            Ok(self.row.to_string())
        }
    }

    /// Returns the first of the alternative fields that is there and says something.
    pub(super) fn text(
        &self,
        keys: &[&'static str],
        remedy: &'static str,
    ) -> Result<String, TaskError> {
        for key in keys {
            if let Some(text) = self.optional_text(key)? {
                return if text.trim().is_empty() {
                    Err(self.empty(key))
                } else {
                    Ok(text)
                };
            }
        }
        Err(self.missing(keys.first().copied().unwrap_or_default(), remedy))
    }

    pub(super) fn optional_text(&self, key: &'static str) -> Result<Option<String>, TaskError> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    pub(super) fn list(&self, key: &'static str) -> Result<Option<Vec<String>>, TaskError> {
        let items = match self.fields.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(items)) => items,
            Some(other) => return Err(self.wrong(key, "a list of strings", other)),
        };
        let text = |item: &Value| match item {
            Value::String(text) => Ok(text.clone()),
            other => Err(TaskError::WrongType {
                path: self.path.to_owned(),
                row: self.row,
                key,
                expected: "a list of strings",
                found: json_type(other),
            }),
        };
        items.iter().map(text).collect::<Result<_, _>>().map(Some)
    }

    pub(super) fn missing(&self, key: &'static str, remedy: &'static str) -> TaskError {
        let names: Vec<String> = self.fields.keys().map(|key| format!("`{key}`")).collect();
        let fields = if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        };
        TaskError::MissingField {
            path: self.path.to_owned(),
            row: self.row,
            key,
            fields,
            remedy,
        }
    }

    /// The field holds something that no grader can use.
    pub(super) fn unsupported(&self, key: &'static str, remedy: &'static str) -> TaskError {
        TaskError::Unsupported {
            path: self.path.to_owned(),
            row: self.row,
            key,
            remedy,
        }
    }

    pub(super) fn empty(&self, key: &'static str) -> TaskError {
        TaskError::EmptyField {
            path: self.path.to_owned(),
            row: self.row,
            key,
        }
    }

    pub(super) fn wrong(
        &self,
        key: &'static str,
        expected: &'static str,
        found: &Value,
    ) -> TaskError {
        TaskError::WrongType {
            path: self.path.to_owned(),
            row: self.row,
            key,
            expected,
            found: json_type(found),
        }
    }
}
