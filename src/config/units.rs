//! Sizes, durations and lists as people write them: `256MiB`, `500ms`, one name for a list of one.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};

/// Reads a name, or a list of them.
pub(super) fn one_or_many<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a name or a list of names")]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(match OneOrMany::deserialize(from)? {
        OneOrMany::One(name) => vec![name],
        OneOrMany::Many(names) => names,
    })
}

/// Bytes: a number, or a text with a unit; written without loss.
pub(super) mod byte_size {
    use bytesize::ByteSize;
    use serde::{Deserialize as _, Deserializer, Serializer};

    const UNITS: [(u64, &str); 3] = [
        (bytesize::GIB, "GiB"),
        (bytesize::MIB, "MiB"),
        (bytesize::KIB, "KiB"),
    ];

    /// Writes the largest unit that leaves no fraction.
    pub(crate) fn serialize<S: Serializer>(size: &ByteSize, to: S) -> Result<S::Ok, S::Error> {
        let bytes = size.as_u64();
        let unit = UNITS
            .iter()
            .find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit));
        match unit {
            Some((unit, name)) => to.collect_str(&format_args!("{}{name}", bytes / unit)),
            None => to.collect_str(&format_args!("{bytes}B")),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ByteSize, D::Error> {
        ByteSize::deserialize(from)
            .map_err(|error| expected(&error, "a size such as `256MiB` or a number of bytes"))
    }

    fn expected<E: serde::de::Error>(error: &E, what: &str) -> E {
        E::custom(format_args!(
            "{}, expected {what}",
            error.to_string().trim_end()
        ))
    }
}

/// As [`byte_size`], for a size that need not be given.
pub(super) mod optional_byte_size {
    use bytesize::ByteSize;
    use serde::{Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "how serde calls it")]
    pub(crate) fn serialize<S: Serializer>(
        size: &Option<ByteSize>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match size {
            Some(size) => super::byte_size::serialize(size, to),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<ByteSize>, D::Error> {
        super::byte_size::deserialize(from).map(Some)
    }
}

/// Durations in jiff's friendly form; a number alone is refused, since its unit is anyone's guess.
pub(super) mod duration {
    use std::time::Duration;

    use jiff::fmt::friendly::{SpanParser, SpanPrinter};
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(crate) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&SpanPrinter::new().unsigned_duration_to_string(time))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(from)
            .map_err(|_| D::Error::custom("expected a duration such as `\"2s\"` or `\"500ms\"`"))?;
        SpanParser::new()
            .parse_unsigned_duration(&text)
            .map_err(|_| D::Error::custom("expected a duration such as `2s`, `500ms` or `1m 30s`"))
    }
}

/// As [`duration`], for a duration that need not be given.
pub(super) mod optional_duration {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "how serde calls it")]
    pub(crate) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => super::duration::serialize(time, to),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        super::duration::deserialize(from).map(Some)
    }
}

/// What [`byte_size`] reads, for the schema.
pub(super) struct SizeText;

impl schemars::JsonSchema for SizeText {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "Bytes: a number, or a text with a unit such as 256MiB.",
            "anyOf": [
                { "type": "string", "examples": ["256MiB", "2GiB", "64KiB"] },
                { "type": "integer", "minimum": 0 },
            ],
        })
    }
}

/// What [`duration`] reads, for the schema.
pub(super) struct DurationText;

impl schemars::JsonSchema for DurationText {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "A duration with its unit.",
            "type": "string",
            "examples": ["2s", "500ms", "1m 30s"],
        })
    }
}

/// What [`one_or_many`] reads, for the schema.
pub(super) struct OneOrMany;

impl schemars::JsonSchema for OneOrMany {
    fn schema_name() -> Cow<'static, str> {
        "OneOrMany".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "A name, or a list of them.",
            "anyOf": [
                { "type": "string" },
                { "type": "array", "items": { "type": "string" } },
            ],
        })
    }
}
