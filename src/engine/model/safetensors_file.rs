//! One safetensors file: its header first, then only the tensors that are asked for.
//!
//! A header is checked against the file's size before anything is allocated for what it promises.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fs_err as fs;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::ModelError;
use super::files::io_error;

/// Largest accepted header: the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A file whose header has been read.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: fs::File,
    /// Where the tensors' bytes begin.
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Opens a file and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let mut file = fs::File::open(path).map_err(|source| io_error(path, source))?;
        let metadata = file.metadata().map_err(|source| io_error(path, source))?;
        let header = read_header(&mut file, metadata.len());
        let (data_start, header) = header.map_err(|source| ModelError::Safetensors {
            path: path.to_owned(),
            source,
        })?;
        let infos = header.tensors().into_iter();
        Ok(Self {
            path: path.to_owned(),
            file,
            data_start,
            tensors: infos.map(|(name, info)| (name, info.clone())).collect(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names and shapes of the tensors, sorted by name.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        (self.tensors.iter()).map(|(name, info)| (name.as_str(), info.shape.as_slice()))
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Fails if the tensor `name` is of a type that we do not read: integers, eight bits and fewer.
    pub(super) fn check_type(&self, name: &str) -> Result<(), ModelError> {
        let Some(info) = self.tensors.get(name) else {
            let name = name.to_owned();
            return Err(ModelError::MissingTensor { name }.in_file(&self.path));
        };
        match float_type(info.dtype) {
            Some(_) => Ok(()),
            None => Err(ModelError::TensorType {
                name: name.to_owned(),
                found: format!("{:?}", info.dtype),
            }
            .in_file(&self.path)),
        }
    }

    /// Reads the tensor `name` and converts it to `dtype`.
    pub(super) fn read(
        &mut self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, ModelError> {
        self.check_type(name)?;
        let info = &self.tensors[name];
        let stored = float_type(info.dtype).expect("checked above");
        let (start, end) = info.data_offsets;
        // No longer than the file, as its header was checked.
        let mut bytes = vec![0; end - start];
        let at = SeekFrom::Start(self.data_start + start as u64);
        (self.file.seek(at))
            .and_then(|_| self.file.read_exact(&mut bytes))
            .map_err(|source| io_error(&self.path, source))?;
        if let Some(index) = first_not_finite(&bytes, stored) {
            let name = name.to_owned();
            return Err(ModelError::NotFinite { name, index }.in_file(&self.path));
        }
        let tensor = Tensor::from_raw_buffer(&bytes, stored, &info.shape, &Device::Cpu)?;
        Ok(tensor.to_dtype(dtype)?.to_device(device)?)
    }
}

/// Reads every tensor of a file, sorted by name.
pub(crate) fn read_safetensors(
    path: &Path,
    dtype: DType,
    device: &Device,
) -> Result<Vec<(String, Tensor)>, ModelError> {
    let mut file = TensorFile::open(path)?;
    let names: Vec<String> = file.tensors.keys().cloned().collect();
    names
        .into_iter()
        .map(|name| Ok((name.clone(), file.read(&name, dtype, device)?)))
        .collect()
}

/// Writes one safetensors file with the metadata that transformers and PEFT ask for.
pub(crate) fn write_safetensors(
    path: &Path,
    tensors: &[(String, Tensor)],
) -> Result<(), ModelError> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let tensors = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), tensor.contiguous()?)))
        .collect::<candle_core::Result<Vec<_>>>()?;
    // The crate writes a private temporary file and renames it; a model is no secret, so it gets
    // the permissions of any other new file.
    let permissions = fs::File::create(path)
        .and_then(|file| file.metadata())
        .map_err(|source| io_error(path, source))?
        .permissions();
    safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|source| {
        ModelError::WriteSafetensors {
            path: path.to_owned(),
            source,
        }
    })?;
    fs::set_permissions(path, permissions).map_err(|source| io_error(path, source))
}

fn float_type(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F32 => Some(DType::F32),
        Dtype::F64 => Some(DType::F64),
        _ => None,
    }
}

/// Reads the header of a file of `file_bytes` bytes; returns where the tensors' bytes begin, too.
///
/// The header's tensors cover the rest of the file without gaps.
fn read_header(
    reader: &mut impl Read,
    file_bytes: u64,
) -> Result<(u64, Metadata), SafeTensorError> {
    let mut length = [0; 8];
    (reader.read_exact(&mut length)).map_err(|_| SafeTensorError::HeaderTooSmall)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(SafeTensorError::HeaderTooLarge);
    }
    let data_start = length + 8;
    if data_start > file_bytes {
        return Err(SafeTensorError::InvalidHeaderLength);
    }
    let mut json = Vec::new();
    reader.take(length).read_to_end(&mut json)?;
    let header: Metadata =
        serde_json::from_slice(&json).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    if data_start + header.data_len() as u64 != file_bytes {
        return Err(SafeTensorError::MetadataIncompleteBuffer);
    }
    Ok((data_start, header))
}

/// Returns the index of the first element that is infinite or not a number.
pub(super) fn first_not_finite(bytes: &[u8], dtype: DType) -> Option<usize> {
    // All bits of the exponent are set.
    fn find<const N: usize>(bytes: &[u8], top: u16, mask: u16) -> Option<usize> {
        let is_bad = |element: &[u8]| {
            let high = u16::from_le_bytes([element[N - 2], element[N - 1]]);
            high & mask == top
        };
        bytes.chunks_exact(N).position(is_bad)
    }
    match dtype {
        DType::F16 => find::<2>(bytes, 0x7c00, 0x7c00),
        DType::BF16 => find::<2>(bytes, 0x7f80, 0x7f80),
        DType::F32 => find::<4>(bytes, 0x7f80, 0x7f80),
        DType::F64 => find::<8>(bytes, 0x7ff0, 0x7ff0),
        _ => None,
    }
}

/// Parses the header of any file, for fuzzing.
///
/// # Panics
///
/// Panics if a header that was accepted promises more than the file holds.
#[cfg(any(fuzzing, test))]
pub fn fuzz_safetensors(bytes: &[u8]) {
    if let Ok((start, header)) = read_header(&mut &*bytes, bytes.len() as u64) {
        let mut end = 0;
        for info in header.tensors().values() {
            let size = info.shape.iter().product::<usize>() * info.dtype.bitsize() / 8;
            assert_eq!(info.data_offsets.1 - info.data_offsets.0, size);
            end = end.max(info.data_offsets.1);
        }
        assert_eq!(
            start + end as u64,
            bytes.len() as u64,
            "the header covers the file"
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn file_of(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const GOOD: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

    #[test]
    fn a_good_header_is_read() {
        let bytes = file_of(GOOD, 8);
        let (start, header) = read_header(&mut &*bytes, bytes.len() as u64).unwrap();
        assert_eq!(start, 8 + GOOD.len() as u64);
        assert_eq!(header.info("a").unwrap().shape, [2]);
    }

    /// Each is refused, and none makes the reader allocate what it promises.
    #[rstest]
    #[case::nothing(Vec::new())]
    #[case::half_a_length(vec![1, 0, 0])]
    #[case::header_of_2_to_63_bytes(u64::MAX.to_le_bytes().to_vec())]
    #[case::header_beyond_the_file(99_000_000_u64.to_le_bytes().to_vec())]
    #[case::truncated_data(file_of(GOOD, 7))]
    #[case::trailing_data(file_of(GOOD, 9))]
    #[case::no_json(file_of("{", 0))]
    #[case::size_against_shape(file_of(&GOOD.replace("[2]", "[3]"), 8))]
    #[case::overflowing_shape(file_of(&GOOD.replace("[2]", "[4294967296,4294967296,2]"), 8))]
    #[case::reversed_offsets(file_of(&GOOD.replace("[0,8]", "[8,0]"), 8))]
    #[case::a_gap(file_of(&GOOD.replace("[0,8]", "[8,16]"), 16))]
    #[case::unknown_type(file_of(&GOOD.replace("F32", "F33"), 8))]
    #[case::deep_json(file_of(&"[".repeat(100_000), 0))]
    fn bad_headers_are_refused(#[case] bytes: Vec<u8>) {
        read_header(&mut &*bytes, bytes.len() as u64).unwrap_err();
        fuzz_safetensors(&bytes);
    }

    #[test]
    fn numbers_that_are_not_finite_are_found() {
        let f32s = |values: &[f32]| -> Vec<u8> {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        assert_eq!(first_not_finite(&f32s(&[1.0, -3e38]), DType::F32), None);
        assert_eq!(
            first_not_finite(&f32s(&[1.0, f32::NAN]), DType::F32),
            Some(1)
        );
        let infinite = f32s(&[f32::NEG_INFINITY]);
        assert_eq!(first_not_finite(&infinite, DType::F32), Some(0));
        // 65504, the largest half, then infinity; as bfloat16 both are finite.
        let halves = [0xff, 0x7b, 0x00, 0x7c];
        assert_eq!(first_not_finite(&halves, DType::F16), Some(1));
        assert_eq!(first_not_finite(&halves, DType::BF16), None);
        assert_eq!(first_not_finite(&[0x80, 0xff], DType::BF16), Some(0));
        assert_eq!(
            first_not_finite(&f64::NAN.to_le_bytes(), DType::F64),
            Some(0)
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(
            header in "[\\[\\]{}:,\"a-z0-9FI]{0,60}",
            data in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            fuzz_safetensors(&data);
            fuzz_safetensors(&file_of(&header, data.len()));
            fuzz_safetensors(&file_of(&GOOD.replacen("[2]", &header, 1), data.len()));
        }
    }
}
