//! Values as Harbor takes them: numbers that may be written as text, and whatever a table holds.

use serde::{Deserialize, Deserializer, Serializer, de};

use super::config::TaskOs;

/// A number, or one written as text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Whole(i64),
    Float(f64),
    Text(String),
}

impl Number {
    #[expect(
        clippy::cast_precision_loss,
        reason = "seconds, rewards and processors are far below 2^53"
    )]
    fn float<E: de::Error>(self) -> Result<f64, E> {
        match self {
            Self::Whole(number) => Ok(number as f64),
            Self::Float(number) => Ok(number),
            Self::Text(text) => (text.trim().parse())
                .map_err(|_| E::custom(format_args!("`{text}` is not a number"))),
        }
    }

    fn whole<E: de::Error>(self) -> Result<i64, E> {
        match self {
            Self::Whole(number) => Ok(number),
            Self::Text(text) => (text.trim().parse())
                .map_err(|_| E::custom(format_args!("`{text}` is not a whole number"))),
            Self::Float(number) => {
                as_whole(number).ok_or_else(|| E::custom("it is not a whole number"))
            }
        }
    }
}

/// Returns a number without a fraction as such.
fn as_whole(number: f64) -> Option<i64> {
    const LIMIT: f64 = 9_007_199_254_740_992.0; // 2^53, up to which every whole number is exact
    #[expect(
        clippy::cast_possible_truncation,
        reason = "it is whole and below 2^53"
    )]
    (number.fract() == 0.0 && number.abs() <= LIMIT).then_some(number as i64)
}

pub(super) fn float<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Number::deserialize(deserializer)?.float()
}

pub(super) fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    Number::deserialize(deserializer)?.whole()
}

pub(super) fn optional_float<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<f64>, D::Error> {
    let number = Option::<Number>::deserialize(deserializer)?;
    number.map(Number::float).transpose()
}

pub(super) fn optional_whole<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<i64>, D::Error> {
    let number = Option::<Number>::deserialize(deserializer)?;
    number.map(Number::whole).transpose()
}

pub(super) fn os<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TaskOs, D::Error> {
    let name = String::deserialize(deserializer)?;
    match name.to_lowercase().as_str() {
        "linux" => Ok(TaskOs::Linux),
        "windows" => Ok(TaskOs::Windows),
        _ => Err(de::Error::custom(format_args!(
            "`{name}` is neither `linux` nor `windows`"
        ))),
    }
}

#[expect(clippy::ref_option, reason = "serde hands over a reference")]
pub(super) fn whole_or_float<S: Serializer>(
    number: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match number {
        None => serializer.serialize_none(),
        Some(number) => match as_whole(*number) {
            Some(whole) => serializer.serialize_i64(whole),
            None => serializer.serialize_f64(*number),
        },
    }
}

/// A table of anything, as JSON; dates become text.
pub(super) mod any {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
    use serde_json::{Map, Value};

    pub(in super::super) fn serialize<S: Serializer>(
        table: &Map<String, Value>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        table.serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Map<String, Value>, D::Error> {
        let table = toml::Table::deserialize(deserializer)?;
        Ok(table
            .into_iter()
            .map(|(key, value)| (key, json(value)))
            .collect())
    }

    fn json(value: toml::Value) -> Value {
        match value {
            toml::Value::String(text) => Value::String(text),
            toml::Value::Integer(number) => number.into(),
            toml::Value::Float(number) => number.into(),
            toml::Value::Boolean(yes) => yes.into(),
            toml::Value::Datetime(when) => when.to_string().into(),
            toml::Value::Array(items) => items.into_iter().map(json).collect(),
            toml::Value::Table(table) => table
                .into_iter()
                .map(|(key, value)| (key, json(value)))
                .collect(),
        }
    }
}
