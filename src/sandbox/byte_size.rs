//! Sizes as numbers of bytes, for `#[serde(with = "…")]`: the type's own form is rounded.

use bytesize::ByteSize;
use serde::{Deserialize as _, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(value: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(value.as_u64())
}

/// Also reads text with a unit.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ByteSize, D::Error> {
    ByteSize::deserialize(deserializer)
}
