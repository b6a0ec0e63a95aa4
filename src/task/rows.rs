//! Rows of a task file as JSON objects, whatever the file format, with everything bounded before
//! it is read.

use std::io::{BufReader, Read as _};
use std::path::Path;

use parquet::file::reader::{FileReader as _, SerializedFileReader};
use serde::de::{DeserializeSeed, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::TaskError;
use crate::lines::{LineError, Lines};

/// The largest JSON file, and the largest uncompressed parquet table, that is read. The full MBPP
/// is 0.6 MB and MBPP+ with its big inputs 2 MB; this leaves two orders of magnitude.
const MAX_FILE_BYTES: u64 = 512 << 20;

/// The longest line of a JSON Lines file.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// The most rows of one file.
const MAX_ROWS: u64 = 1_000_000;

/// One row: its position in the file, counted from 1, and its fields.
pub(super) type Row = (u64, Map<String, Value>);

/// Reads all rows of a `.json`, `.jsonl` or `.parquet` file.
///
/// # Errors
///
/// Fails with the row's number when the file is unreadable, over a limit or malformed.
pub(super) fn read_rows(path: &Path) -> Result<Vec<Row>, TaskError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("json") => read_json(path),
        Some("jsonl") => read_json_lines(path),
        Some("parquet") => read_parquet(path),
        _ => Err(TaskError::UnknownFormat {
            path: path.to_owned(),
        }),
    }
}

fn open(path: &Path) -> Result<fs_err::File, TaskError> {
    fs_err::File::open(path).map_err(|source| TaskError::Io {
        path: path.to_owned(),
        source,
    })
}

fn check_limit(path: &Path, what: &'static str, found: u64, limit: u64) -> Result<(), TaskError> {
    if found > limit {
        return Err(TaskError::TooLarge {
            path: path.to_owned(),
            what,
            found,
            limit,
        });
    }
    Ok(())
}

fn object(path: &Path, row: u64, value: Value) -> Result<Row, TaskError> {
    match value {
        Value::Object(fields) => Ok((row, fields)),
        other => Err(TaskError::NotAnObject {
            path: path.to_owned(),
            row,
            found: json_type(&other),
        }),
    }
}

/// Names the JSON type of a value, for messages.
pub(super) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn read_json_lines(path: &Path) -> Result<Vec<Row>, TaskError> {
    let mut rows = Vec::new();
    for (row, line) in Lines::new(BufReader::new(open(path)?), MAX_LINE_BYTES) {
        let line = line.map_err(|error| match error {
            LineError::Io(source) => TaskError::Io {
                path: path.to_owned(),
                source,
            },
            LineError::TooLong { limit } => TaskError::TooLarge {
                path: path.to_owned(),
                what: "bytes in a line",
                found: limit + 1,
                limit,
            },
        })?;
        check_limit(path, "rows", row, MAX_ROWS)?;
        let value = serde_json::from_slice(&line).map_err(|source| TaskError::Json {
            path: path.to_owned(),
            row,
            source,
        })?;
        rows.push(object(path, row, value)?);
    }
    Ok(rows)
}

fn read_json(path: &Path) -> Result<Vec<Row>, TaskError> {
    let io = |source| TaskError::Io {
        path: path.to_owned(),
        source,
    };
    let mut text = Vec::new();
    open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(io)?;
    check_limit(path, "bytes", text.len() as u64, MAX_FILE_BYTES)?;
    let mut values = Vec::new();
    let mut parser = serde_json::Deserializer::from_slice(&text);
    let parsed = Elements(&mut values)
        .deserialize(&mut parser)
        .and_then(|()| parser.end());
    // Elements before a fault were kept, so the fault is in the row after them.
    let fault = values.len() as u64 + 1;
    if let Err(source) = parsed {
        if source.is_data() {
            let found = serde_json::from_slice(&text)
                .as_ref()
                .map_or("not JSON", json_type);
            return Err(TaskError::NotAnObject {
                path: path.to_owned(),
                row: fault,
                found,
            });
        }
        return Err(TaskError::Json {
            path: path.to_owned(),
            row: fault,
            source,
        });
    }
    check_limit(path, "rows", values.len() as u64, MAX_ROWS)?;
    (1..)
        .zip(values)
        .map(|(row, value)| object(path, row, value))
        .collect()
}

/// Collects the elements of a JSON array and keeps those before a fault.
struct Elements<'a>(&'a mut Vec<Value>);

impl<'de> DeserializeSeed<'de> for Elements<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Elements<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(value) = elements.next_element()? {
            self.0.push(value);
        }
        Ok(())
    }
}

fn read_parquet(path: &Path) -> Result<Vec<Row>, TaskError> {
    let fault = |source| TaskError::Parquet {
        path: path.to_owned(),
        source,
    };
    let reader = SerializedFileReader::new(open(path)?.into_file()).map_err(fault)?;
    let groups = reader.metadata().row_groups();
    let total = |of: fn(&parquet::file::metadata::RowGroupMetaData) -> i64| {
        groups
            .iter()
            .map(|group| u64::try_from(of(group)).unwrap_or(u64::MAX))
            .fold(0, u64::saturating_add)
    };
    check_limit(
        path,
        "uncompressed bytes",
        total(|group| group.total_byte_size()),
        MAX_FILE_BYTES,
    )?;
    check_limit(path, "rows", total(|group| group.num_rows()), MAX_ROWS)?;
    let rows = reader.get_row_iter(None).map_err(fault)?;
    (1..)
        .zip(rows)
        .map(|(row, value)| object(path, row, value.map_err(fault)?.to_json_value()))
        .collect()
}
