//! The header of a GGUF file: metadata and the table of tensors.
//!
//! After <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3. Every count and
//! length is checked against a limit and against what is left of the file before anything is
//! allocated for it, and arrays that nobody asks for are not kept.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};

use candle_core::quantized::GgmlDType;

/// Most bytes of a header; a vocabulary of 256,000 tokens with its merges has some 10 MB.
const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Longest text; some tools put a whole `tokenizer.json` of 10 MB into one.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Most items of an array; the longest in use are lists of some 500,000 merges.
const MAX_ITEMS: u64 = 1 << 22;

/// Most keys, and most tensors.
const MAX_ENTRIES: u64 = 1 << 16;

const MAX_DIMENSIONS: u32 = 4;

const MAX_ALIGNMENT: u64 = 1 << 16;

/// Why a header cannot be used.
#[derive(Debug)]
pub(super) enum HeaderError {
    Io(io::Error),
    Malformed {
        /// Metadata key, tensor, or part of the header.
        key: String,
        problem: &'static str,
    },
    Unsupported {
        key: String,
        found: String,
        supported: &'static str,
    },
}

/// A metadata value, as far as models need it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    Float32(f32),
    Float64(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i64>),
    /// An array of something else.
    Other,
}

/// Where a tensor lies, and as what.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorInfo {
    pub(super) dtype: GgmlDType,
    /// Outermost first, as everywhere but in the file.
    pub(super) dims: Vec<usize>,
    /// From the file's first byte.
    pub(super) start: u64,
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Reads the header of a file of `file_bytes` bytes. Every tensor lies within the file.
    pub(super) fn read(reader: impl Read, file_bytes: u64) -> Result<Self, HeaderError> {
        let mut parser = Parser {
            reader,
            consumed: 0,
            limit: file_bytes.min(MAX_HEADER_BYTES),
            is_limited: file_bytes > MAX_HEADER_BYTES,
        };
        if parser.bytes::<4>("header")? != *b"GGUF" {
            return Err(malformed("header", "not that of a GGUF file"));
        }
        let version = parser.u32("version")?;
        if !(2..=3).contains(&version) {
            return Err(HeaderError::Unsupported {
                key: "version".to_owned(),
                found: version.to_string(),
                supported: "2, 3, little-endian",
            });
        }
        let tensor_count = parser.count("tensor count", MAX_ENTRIES, 1)?;
        let key_count = parser.count("metadata count", MAX_ENTRIES, 1)?;
        let mut metadata = HashMap::new();
        for _ in 0..key_count {
            let key = parser.text("metadata key")?;
            let value = parser.value(&key)?;
            if metadata.contains_key(&key) {
                return Err(malformed(&key, "there twice"));
            }
            metadata.insert(key, value);
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = parser.text("tensor name")?;
            let info = parser.tensor(&name)?;
            if tensors.contains_key(&name) {
                return Err(malformed(&name, "there twice"));
            }
            tensors.insert(name, info);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Integer(value)) => match u64::try_from(*value) {
                Ok(value) if value.is_power_of_two() && value <= MAX_ALIGNMENT => value,
                _ => {
                    return Err(malformed(
                        "general.alignment",
                        "no power of two up to 65536",
                    ));
                }
            },
            Some(_) => return Err(malformed("general.alignment", "not a count")),
        };
        let data_start = parser.consumed.next_multiple_of(alignment);
        for (name, info) in &mut tensors {
            if !info.start.is_multiple_of(alignment) {
                return Err(malformed(name, "not aligned"));
            }
            let start = info.start.checked_add(data_start);
            let end = start.and_then(|start| start.checked_add(info.bytes as u64));
            match (start, end) {
                (Some(start), Some(end)) if end <= file_bytes => info.start = start,
                _ => {
                    let problem = "beyond the end of the file; is the download complete?";
                    return Err(malformed(name, problem));
                }
            }
        }
        Ok(Self { metadata, tensors })
    }
}

fn malformed(key: &str, problem: &'static str) -> HeaderError {
    HeaderError::Malformed {
        key: key.to_owned(),
        problem,
    }
}

/// Returns candle's name of a tensor type.
fn tensor_type(number: u32) -> Option<GgmlDType> {
    Some(match number {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

struct Parser<R> {
    reader: R,
    consumed: u64,
    /// Bytes of the header at most.
    limit: u64,
    /// Whether the limit is ours and not the file's size.
    is_limited: bool,
}

impl<R: Read> Parser<R> {
    fn left(&self) -> u64 {
        self.limit - self.consumed
    }

    /// Fails if fewer than `needed` bytes are left for `key`.
    fn check(&self, key: &str, needed: u64) -> Result<(), HeaderError> {
        if needed <= self.left() {
            return Ok(());
        }
        Err(malformed(
            key,
            if self.is_limited {
                "beyond the first 256 MiB, where headers end"
            } else {
                "cut off; is the download complete?"
            },
        ))
    }

    fn fill(&mut self, key: &str, buffer: &mut [u8]) -> Result<(), HeaderError> {
        self.check(key, buffer.len() as u64)?;
        self.reader.read_exact(buffer).map_err(HeaderError::Io)?;
        self.consumed += buffer.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, key: &str) -> Result<[u8; N], HeaderError> {
        let mut buffer = [0; N];
        self.fill(key, &mut buffer)?;
        Ok(buffer)
    }

    fn u32(&mut self, key: &str) -> Result<u32, HeaderError> {
        self.bytes(key).map(u32::from_le_bytes)
    }

    fn u64(&mut self, key: &str) -> Result<u64, HeaderError> {
        self.bytes(key).map(u64::from_le_bytes)
    }

    /// Reads how many things of at least `size` bytes follow.
    fn count(&mut self, key: &str, limit: u64, size: u64) -> Result<u64, HeaderError> {
        let count = self.u64(key)?;
        if count > limit {
            return Err(malformed(key, "larger than any that we expect there"));
        }
        self.check(key, count.saturating_mul(size))?;
        Ok(count)
    }

    fn text(&mut self, key: &str) -> Result<String, HeaderError> {
        let length = self.count(key, MAX_TEXT_BYTES, 1)?;
        let mut bytes = vec![0; usize::try_from(length).expect("at most 2^26")];
        self.fill(key, &mut bytes)?;
        String::from_utf8(bytes).map_err(|_| malformed(key, "not UTF-8"))
    }

    /// Reads a number of type `kind`; `None` if it is no number's.
    fn number(&mut self, key: &str, kind: u32) -> Result<Option<Value>, HeaderError> {
        Ok(Some(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.bytes(key)?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.bytes(key)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.bytes(key)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.bytes(key)?).into()),
            4 => Value::Integer(self.u32(key)?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.bytes(key)?).into()),
            6 => Value::Float32(f32::from_le_bytes(self.bytes(key)?)),
            7 => match self.bytes(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return Err(malformed(key, "neither true nor false")),
            },
            10 => Value::Integer(self.u64(key)?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.bytes(key)?).into()),
            12 => Value::Float64(f64::from_le_bytes(self.bytes(key)?)),
            _ => return Ok(None),
        }))
    }

    fn value(&mut self, key: &str) -> Result<Value, HeaderError> {
        const TEXT: u32 = 8;
        const ARRAY: u32 = 9;
        let kind = self.u32(key)?;
        match kind {
            TEXT => Ok(Value::Text(self.text(key)?)),
            ARRAY => match self.u32(key)? {
                TEXT => {
                    let count = self.count(key, MAX_ITEMS, 8)?;
                    let texts = (0..count).map(|_| self.text(key));
                    Ok(Value::Texts(texts.collect::<Result<_, _>>()?))
                }
                kind => self.numbers(key, kind),
            },
            kind => {
                let number = self.number(key, kind)?;
                number.ok_or_else(|| malformed(key, "of an unknown type"))
            }
        }
    }

    fn numbers(&mut self, key: &str, kind: u32) -> Result<Value, HeaderError> {
        let count = self.count(key, MAX_ITEMS, 1)?;
        let mut integers = Vec::new();
        let mut are_integers = true;
        for _ in 0..count {
            let Some(number) = self.number(key, kind)? else {
                return Err(malformed(key, "an array of arrays or of an unknown type"));
            };
            match number {
                Value::Integer(number) if are_integers => match i64::try_from(number) {
                    Ok(number) => integers.push(number),
                    Err(_) => are_integers = false,
                },
                _ => are_integers = false,
            }
        }
        Ok(if are_integers {
            Value::Integers(integers)
        } else {
            Value::Other
        })
    }

    /// Reads an entry of the table of tensors; `start` is still from the first tensor's byte.
    fn tensor(&mut self, name: &str) -> Result<TensorInfo, HeaderError> {
        let count = self.u32(name)?;
        if !(1..=MAX_DIMENSIONS).contains(&count) {
            return Err(malformed(name, "not of one to four dimensions"));
        }
        let mut dims = Vec::new();
        let mut elements: usize = 1;
        for _ in 0..count {
            let dim = self.u64(name)?;
            let dim = usize::try_from(dim).ok().filter(|&dim| dim > 0);
            let product = dim.and_then(|dim| Some((dim, elements.checked_mul(dim)?)));
            // No tensor has 2^48 elements, and eight bytes for each of them do not overflow.
            let Some((dim, product)) = product.filter(|(_, product)| *product < 1 << 48) else {
                return Err(malformed(name, "empty or too large"));
            };
            elements = product;
            dims.push(dim);
        }
        let number = self.u32(name)?;
        let dtype = tensor_type(number).ok_or_else(|| HeaderError::Unsupported {
            key: name.to_owned(),
            found: format!("tensor type {number}"),
            supported: "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K",
        })?;
        if !dims[0].is_multiple_of(dtype.block_size()) {
            return Err(malformed(name, "not made of whole blocks"));
        }
        let start = self.u64(name)?;
        dims.reverse();
        Ok(TensorInfo {
            dtype,
            dims,
            start,
            bytes: elements / dtype.block_size() * dtype.type_size(),
        })
    }
}

/// Parses any bytes as a GGUF header, for fuzzing.
///
/// # Panics
///
/// Panics if a header that was accepted promises more than the file holds.
#[cfg(any(fuzzing, test))]
pub fn fuzz_gguf(bytes: &[u8]) {
    if let Ok(header) = Header::read(bytes, bytes.len() as u64) {
        for info in header.tensors.values() {
            assert!(info.start + info.bytes as u64 <= bytes.len() as u64);
            let elements: usize = info.dims.iter().product();
            let size = elements / info.dtype.block_size() * info.dtype.type_size();
            assert_eq!(info.bytes, size);
        }
    }
}
