//! The values that the host itself exchanges with a guest.
//!
//! The format is in `wasm-runtimes/cpython/CODEC.md`. Only the part that the host sends and reads
//! is here: `None`, booleans, small integers, text, lists and tuples, and no references between
//! them. What candidates and graders say to each other passes through the host unread.
//!
//! A reply is made in memory that a submission may own, so decoding refuses whatever is not
//! exactly right and allocates no more than the bytes at hand can fill.

/// Values nest no deeper than this, the outermost having depth 0.
const MAX_DEPTH: usize = 200;
/// Bytes of a length's longest encoding.
const MAX_LENGTH_BYTES: u32 = 5;

/// A value on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    /// Python's `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// Text; lone surrogates arrive as U+FFFD.
    Str(String),
    /// A list.
    List(Vec<Self>),
    /// A tuple.
    Tuple(Vec<Self>),
}

/// Why bytes are not a [`Value`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CodecError {
    /// There are more bytes than this kind of message has.
    #[error("message of {size} bytes exceeds {limit} bytes")]
    TooLarge {
        /// The message's size.
        size: usize,
        /// The most that is read.
        limit: usize,
    },
    /// The bytes end inside a value.
    #[error("message ends early")]
    Truncated,
    /// Bytes follow the value.
    #[error("{extra} bytes follow the message")]
    TrailingBytes {
        /// Their number.
        extra: usize,
    },
    /// A tag that does not exist or is not for the host.
    #[error("unexpected tag {tag:#04x}")]
    UnexpectedTag {
        /// The tag.
        tag: u8,
    },
    /// A length that has too many bytes or claims more than is there.
    #[error("bad length")]
    BadLength,
    /// An integer of no bytes or beyond 64 bits.
    #[error("bad integer")]
    BadInteger,
    /// Text that is not UTF-8, lone surrogates aside.
    #[error("bad text")]
    BadText,
    /// A value that nests too deeply.
    #[error("value nests deeper than {MAX_DEPTH}")]
    TooDeep,
}

impl Value {
    /// Makes a text value.
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self::Str(text.into())
    }

    /// Makes a list of texts.
    pub(super) fn texts(texts: &[String]) -> Self {
        Self::List(texts.iter().map(Self::text).collect())
    }

    /// Encodes the value.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.encode_into(&mut bytes);
        bytes
    }

    fn encode_into(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::None => bytes.push(b'N'),
            Self::Bool(true) => bytes.push(b'T'),
            Self::Bool(false) => bytes.push(b'F'),
            Self::Int(value) => {
                let digits = value.to_le_bytes();
                let length = shortest_twos_complement(&digits);
                put_head(bytes, b'i', length);
                bytes.extend_from_slice(&digits[..length]);
            }
            Self::Str(text) => {
                put_head(bytes, b's', text.len());
                bytes.extend_from_slice(text.as_bytes());
            }
            Self::List(members) | Self::Tuple(members) => {
                let tag = if matches!(self, Self::List(_)) {
                    b'l'
                } else {
                    b't'
                };
                put_head(bytes, tag, members.len());
                for member in members {
                    member.encode_into(bytes);
                }
            }
        }
    }

    /// Decodes a message of at most `limit` bytes.
    ///
    /// # Errors
    ///
    /// Returns a [`CodecError`] for anything but exactly one value.
    pub(super) fn decode(bytes: &[u8], limit: usize) -> Result<Self, CodecError> {
        if bytes.len() > limit {
            return Err(CodecError::TooLarge {
                size: bytes.len(),
                limit,
            });
        }
        let mut reader = Reader { bytes };
        let value = reader.value(0)?;
        match reader.bytes.len() {
            0 => Ok(value),
            extra => Err(CodecError::TrailingBytes { extra }),
        }
    }
}

/// The bytes not read yet.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Result<Value, CodecError> {
        if depth > MAX_DEPTH {
            return Err(CodecError::TooDeep);
        }
        match self.byte()? {
            b'N' => Ok(Value::None),
            b'T' => Ok(Value::Bool(true)),
            b'F' => Ok(Value::Bool(false)),
            b'i' => self.integer(),
            b's' => self.text(),
            b'l' => Ok(Value::List(self.members(depth)?)),
            b't' => Ok(Value::Tuple(self.members(depth)?)),
            tag => Err(CodecError::UnexpectedTag { tag }),
        }
    }

    fn byte(&mut self) -> Result<u8, CodecError> {
        let (first, rest) = self.bytes.split_first().ok_or(CodecError::Truncated)?;
        self.bytes = rest;
        Ok(*first)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], CodecError> {
        let (taken, rest) = self
            .bytes
            .split_at_checked(length)
            .ok_or(CodecError::Truncated)?;
        self.bytes = rest;
        Ok(taken)
    }

    /// Reads an unsigned LEB128 that is at most the number of bytes left.
    fn length(&mut self) -> Result<usize, CodecError> {
        let mut length = 0_u64;
        for index in 0..MAX_LENGTH_BYTES {
            let byte = self.byte()?;
            length |= u64::from(byte & 0x7f) << (7 * index);
            if byte & 0x80 == 0 {
                return usize::try_from(length)
                    .ok()
                    .filter(|&length| length <= self.bytes.len())
                    .ok_or(CodecError::BadLength);
            }
        }
        Err(CodecError::BadLength)
    }

    fn integer(&mut self) -> Result<Value, CodecError> {
        let length = self.length()?;
        let digits = self.take(length)?;
        let last = digits.last().ok_or(CodecError::BadInteger)?;
        let mut extended = if last & 0x80 == 0 { [0; 8] } else { [0xff; 8] };
        extended
            .get_mut(..length)
            .ok_or(CodecError::BadInteger)?
            .copy_from_slice(digits);
        Ok(Value::Int(i64::from_le_bytes(extended)))
    }

    fn text(&mut self) -> Result<Value, CodecError> {
        let length = self.length()?;
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Value::text(text)),
            Err(_) => replace_surrogates(bytes).map(Value::Str),
        }
    }

    fn members(&mut self, depth: usize) -> Result<Vec<Value>, CodecError> {
        // A member takes at least a byte, so there are no more than there are bytes left; the
        // vector still grows only as members are found.
        let count = self.length()?;
        let mut members = Vec::new();
        for _ in 0..count {
            members.push(self.value(depth + 1)?);
        }
        Ok(members)
    }
}

fn put_head(bytes: &mut Vec<u8>, tag: u8, length: usize) {
    bytes.push(tag);
    let mut rest = length;
    loop {
        let low = (rest & 0x7f).to_le_bytes()[0];
        rest >>= 7;
        if rest == 0 {
            bytes.push(low);
            return;
        }
        bytes.push(low | 0x80);
    }
}

/// How many of the little-endian `digits` say all that they say.
fn shortest_twos_complement(digits: &[u8; 8]) -> usize {
    let redundant = |length: usize| {
        let (sign, below) = (digits[length - 1], digits[length - 2]);
        (sign == 0 && below & 0x80 == 0) || (sign == 0xff && below & 0x80 != 0)
    };
    (2..=8)
        .rev()
        .find(|&length| !redundant(length))
        .unwrap_or(1)
}

/// Decodes UTF-8 in which lone surrogates may stand as three bytes (`ED A0..BF 80..BF`).
fn replace_surrogates(bytes: &[u8]) -> Result<String, CodecError> {
    let mut text = String::new();
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return Ok(text);
            }
            Err(error) => {
                let (valid, invalid) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).map_err(|_| CodecError::BadText)?);
                match invalid {
                    [0xed, 0xa0..=0xbf, 0x80..=0xbf, after @ ..] => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = after;
                    }
                    _ => return Err(CodecError::BadText),
                }
            }
        }
    }
}

/// Reads bytes as a value, for the fuzz target; what can be read is written and read as it was.
///
/// # Panics
///
/// Panics if what is read is not what is written.
#[cfg(any(fuzzing, test))]
pub fn fuzz_value(bytes: &[u8]) {
    const LIMIT: usize = 1 << 20;
    if let Ok(value) = Value::decode(bytes, LIMIT) {
        // Text with a lone surrogate is written with the three bytes of U+FFFD in its place.
        let written = value.encode();
        assert_eq!(Value::decode(&written, LIMIT).as_ref(), Ok(&value));
    }
}

#[cfg(test)]
mod tests;
