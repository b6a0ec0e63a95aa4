//! A session in a file.
//!
//! Layout, little-endian: `wardian\0`, format version (u32), then a zstd frame, then the blake3
//! hash of all before it. In the frame: the guest's hash (32 bytes), whether the session is
//! seeded (u8), whether its last program had arguments (u8), the clock (elapsed and start, u64 each,
//! ns), the generator's seed (32 bytes) and position (u128), memory size (u64), number of pages
//! (u32), their indices (u32 each), their content (4096 bytes each).

use std::io::{self, Read as _, Write as _};
use std::path::Path;

use blake3::Hash;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::error::SandboxError;
use super::host::{Carried, Clock};
use super::instance::GuestState;
use super::memory::{PAGE, WASM_PAGE};

const MAGIC: &[u8; 8] = b"wardian\0";
const VERSION: u32 = 1;
const HASH: usize = 32;
/// The largest memory that a file may describe.
const MAX_MEMORY: u64 = 4 << 30;
/// The largest snapshot that crosses between processes of ours, packed or unpacked.
pub(super) const MAX_IN_TRANSIT: u64 = 5 << 30;
/// Pages compress well; a fast level is within a few percent of a slow one.
const COMPRESSION: i32 = 3;

/// A session at rest: what [`Session::snapshot`](super::Session::snapshot) saved.
///
/// It holds the pages that the session changed, so it is small, and it can be resumed by every
/// process and on every machine with the same guest.
///
/// A snapshot is as trustworthy as the program that ran in the session: resumed, it is a guest
/// like any other, with the limits given then.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(super) guest: Hash,
    pub(super) is_seeded: bool,
    pub(super) state: GuestState,
}

impl Snapshot {
    /// Returns the memory that the session has, in bytes: the least that its limit may be.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.state.memory_bytes as u64
    }

    /// Writes the snapshot to a file. Equal sessions give equal files.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::SnapshotFile`] if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), SandboxError> {
        let save = || {
            let folder = path
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty());
            let mut file =
                tempfile::NamedTempFile::new_in(folder.unwrap_or_else(|| Path::new(".")))?;
            file.write_all(&self.to_bytes()?)?;
            file.persist(path)?;
            Ok(())
        };
        save().map_err(|source: io::Error| SandboxError::SnapshotFile {
            path: path.to_owned(),
            source,
        })
    }

    /// Reads a snapshot from a file of at most `max_bytes`, and of at most as much when unpacked.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::SnapshotFile`] if the file cannot be read, is too large, damaged,
    /// or of another version.
    pub fn load(path: &Path, max_bytes: u64) -> Result<Self, SandboxError> {
        let load = || {
            let mut bytes = Vec::new();
            let file = fs_err::File::open(path)?;
            file.take(max_bytes.saturating_add(1))
                .read_to_end(&mut bytes)?;
            if bytes.len() as u64 > max_bytes {
                return Err(invalid(format!("larger than {max_bytes} bytes")));
            }
            Self::from_bytes(&bytes, max_bytes)
        };
        load().map_err(|source| SandboxError::SnapshotFile {
            path: path.to_owned(),
            source,
        })
    }

    pub(super) fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let state = &self.state;
        let mut body = Vec::with_capacity(state.content.len() + 4 * state.pages.len() + 256);
        body.extend_from_slice(self.guest.as_bytes());
        body.push(self.is_seeded.into());
        body.push(state.carried.has_arguments.into());
        body.extend_from_slice(&state.carried.clock.elapsed_ns.to_le_bytes());
        body.extend_from_slice(&state.carried.clock.start_ns.to_le_bytes());
        body.extend_from_slice(&state.carried.random.get_seed());
        body.extend_from_slice(&state.carried.random.get_word_pos().to_le_bytes());
        body.extend_from_slice(&(state.memory_bytes as u64).to_le_bytes());
        body.extend_from_slice(&index(state.pages.len())?.to_le_bytes());
        for &page in &state.pages {
            body.extend_from_slice(&index(page)?.to_le_bytes());
        }
        body.extend_from_slice(&state.content);

        let mut file = MAGIC.to_vec();
        file.extend_from_slice(&VERSION.to_le_bytes());
        zstd::stream::copy_encode(&body[..], &mut file, COMPRESSION)?;
        let hash = blake3::hash(&file);
        file.extend_from_slice(hash.as_bytes());
        Ok(file)
    }

    /// Reads what [`Self::to_bytes`] wrote, if it unpacks to at most `max_bytes`.
    pub(super) fn from_bytes(bytes: &[u8], max_bytes: u64) -> io::Result<Self> {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err(invalid("not a session snapshot".to_owned()));
        };
        let Some((version, _)) = rest.split_first_chunk::<4>() else {
            return Err(truncated());
        };
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(invalid(format!(
                "its format is version {version}, this build reads version {VERSION}"
            )));
        }
        let (hashed, hash) = bytes
            .split_last_chunk::<HASH>()
            .filter(|(hashed, _)| hashed.len() >= MAGIC.len() + 4)
            .ok_or_else(truncated)?;
        if blake3::hash(hashed) != *hash {
            return Err(invalid("damaged: its hash does not fit".to_owned()));
        }
        let frame = &hashed[MAGIC.len() + 4..];
        let mut body = Vec::new();
        zstd::Decoder::with_buffer(frame)?
            .take(max_bytes.saturating_add(1))
            .read_to_end(&mut body)?;
        if body.len() as u64 > max_bytes {
            return Err(invalid(format!("unpacks to more than {max_bytes} bytes")));
        }
        Self::from_body(&body)
    }

    /// Reads what is inside the zstd frame.
    pub(super) fn from_body(body: &[u8]) -> io::Result<Self> {
        let mut body = Reader(body);
        let guest = Hash::from_bytes(body.array()?);
        let is_seeded = body.flag()?;
        let has_arguments = body.flag()?;
        let elapsed_ns = u64::from_le_bytes(body.array()?);
        let clock = Clock::at(elapsed_ns, u64::from_le_bytes(body.array()?));
        let mut random = ChaCha8Rng::from_seed(body.array()?);
        random.set_word_pos(u128::from_le_bytes(body.array()?));
        let memory_bytes = u64::from_le_bytes(body.array()?);
        if memory_bytes > MAX_MEMORY || memory_bytes % WASM_PAGE as u64 != 0 {
            return Err(invalid(format!("a memory of {memory_bytes} bytes")));
        }
        let memory_bytes = usize::try_from(memory_bytes).map_err(io::Error::other)?;
        let count = u32::from_le_bytes(body.array()?) as usize;
        let mut pages = Vec::new();
        for _ in 0..count {
            let page = u32::from_le_bytes(body.array()?) as usize;
            let follows = pages.last().is_none_or(|&last| last < page);
            if !follows || page >= memory_bytes / PAGE {
                return Err(invalid(format!("page {page} is out of place")));
            }
            pages.push(page);
        }
        let content = body.0.to_vec();
        if content.len() != count * PAGE {
            return Err(truncated());
        }
        Ok(Self {
            guest,
            is_seeded,
            state: GuestState {
                memory_bytes,
                pages,
                content,
                carried: Carried {
                    clock,
                    random,
                    has_arguments,
                    files: None,
                },
            },
        })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn flag(&mut self) -> io::Result<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(invalid(format!("a flag of {other}"))),
        }
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk().ok_or_else(truncated)?;
        self.0 = rest;
        Ok(*array)
    }
}

fn index(value: usize) -> io::Result<u32> {
    u32::try_from(value).map_err(io::Error::other)
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

fn truncated() -> io::Error {
    invalid("truncated".to_owned())
}
