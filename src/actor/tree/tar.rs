//! Trees as tar archives, the form in which they enter and leave an actor.
//!
//! Written is what GNU tar and busybox read: ustar with GNU's entries for long names. Read is that, and
//! POSIX's extended headers. What an archive says is the guest's word: sizes are compared with what is
//! there before anything is kept.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use super::{ActorError, Entry, FileTree, TreeLimits, hostile, plain, too_many};
use crate::actor::User;

const BLOCK: usize = 512;
/// What fits a header's field for names.
const MAX_NAME: usize = 100;
/// The longest name that is read, and the largest extended header.
const MAX_LONG: usize = 64 << 10;

impl FileTree {
    /// Returns it as a tar archive whose entries belong to `owner`.
    pub(in crate::actor) fn to_tar(&self, owner: User) -> Vec<u8> {
        let mut archive = Vec::new();
        for (path, entry) in self.iter() {
            let mut name = path.as_os_str().as_bytes().to_vec();
            let (kind, mode, link, bytes): (u8, u32, &[u8], &[u8]) = match entry {
                Entry::Folder => {
                    name.push(b'/');
                    (b'5', 0o755, &[], &[])
                }
                Entry::File { bytes, executable } => {
                    (b'0', if *executable { 0o755 } else { 0o644 }, &[], bytes)
                }
                Entry::Link { target } => (b'2', 0o777, target.as_os_str().as_bytes(), &[]),
            };
            for (long, text) in [(b'L', name.as_slice()), (b'K', link)] {
                if text.len() > MAX_NAME {
                    let terminated = [text, &[0]].concat();
                    push(
                        &mut archive,
                        b"././@LongLink",
                        long,
                        0,
                        &[],
                        &terminated,
                        owner,
                    );
                }
            }
            push(&mut archive, &name, kind, mode, link, bytes, owner);
        }
        archive.resize(archive.len() + 2 * BLOCK, 0);
        archive
    }

    /// Reads a tar archive, without what comes before `strip` in its paths.
    ///
    /// # Errors
    ///
    /// Fails on what is no archive, on paths that leave it, and where it is larger than `limits`.
    pub(in crate::actor) fn from_tar(
        archive: &[u8],
        strip: &Path,
        limits: TreeLimits,
    ) -> Result<Self, ActorError> {
        let mut tree = Self::new();
        let mut rest = archive;
        let mut total = 0;
        let (mut long_name, mut long_link, mut long_size) = (None, None, None);
        while let Some((header, after)) = rest.split_at_checked(BLOCK) {
            if header.iter().all(|byte| *byte == 0) {
                return Ok(tree);
            }
            check_sum(header)?;
            let kind = header[156];
            let size = match long_size.take_if(|_| kind != b'x') {
                Some(size) => size,
                None => number(&header[124..136])?,
            };
            let has_content = matches!(kind, b'0' | 0 | b'7' | b'L' | b'K' | b'x' | b'g');
            let size = usize::try_from(if has_content { size } else { 0 })
                .map_err(|_| hostile("it names a size that cannot be".to_owned()))?;
            let Some((content, _)) = after.split_at_checked(size) else {
                return Err(hostile(
                    "the archive ends in the middle of a file".to_owned(),
                ));
            };
            rest = after.get(size.next_multiple_of(BLOCK)..).unwrap_or(&[]);
            match kind {
                b'L' => long_name = Some(text(limited(content)?).to_vec()),
                b'K' => long_link = Some(text(limited(content)?).to_vec()),
                b'x' => {
                    for (key, value) in records(limited(content)?)? {
                        match key {
                            b"path" => long_name = Some(value.to_vec()),
                            b"linkpath" => long_link = Some(value.to_vec()),
                            b"size" => long_size = Some(decimal(value)?),
                            _ => {}
                        }
                    }
                }
                b'g' => {}
                _ => {
                    let name = long_name.take().unwrap_or_else(|| short_name(header));
                    let link = long_link
                        .take()
                        .unwrap_or_else(|| text(&header[157..257]).to_vec());
                    let Some(path) = stripped(&name, strip)? else {
                        continue;
                    };
                    let entry = match kind {
                        b'0' | 0 | b'7' => Entry::File {
                            bytes: content.to_vec(),
                            executable: number(&header[100..108])? & 0o100 != 0,
                        },
                        b'1' => linked(&tree, &link, strip)?,
                        b'2' => Entry::Link {
                            target: PathBuf::from(OsString::from_vec(link)),
                        },
                        b'5' => Entry::Folder,
                        // Devices and pipes are nothing to keep.
                        b'3' | b'4' | b'6' => continue,
                        other => {
                            return Err(hostile(format!("it has an entry of kind {other}")));
                        }
                    };
                    if let Entry::File { bytes, .. } = &entry {
                        total += bytes.len() as u64;
                    }
                    if total > limits.bytes {
                        return Err(ActorError::TreeTooLarge {
                            limit: limits.bytes,
                            unit: "bytes",
                        });
                    }
                    tree.insert(path, entry)?;
                    if tree.len() as u64 > limits.entries {
                        return Err(too_many(limits));
                    }
                }
            }
        }
        Err(hostile("the archive has no end".to_owned()))
    }
}

/// Returns the path of an entry below `strip`, or none for `strip` itself.
fn stripped(name: &[u8], strip: &Path) -> Result<Option<PathBuf>, ActorError> {
    let path = Path::new(std::ffi::OsStr::from_bytes(name));
    if path
        .components()
        .all(|part| part == std::path::Component::CurDir)
    {
        return Ok(None);
    }
    let path = plain(path)?;
    match path.strip_prefix(strip) {
        Ok(inside) if inside.as_os_str().is_empty() => Ok(None),
        Ok(inside) => Ok(Some(inside.to_owned())),
        Err(_) => Err(hostile(format!("`{}` was not asked for", path.display()))),
    }
}

/// Returns the file that a hard link names, which must have come before.
fn linked(tree: &FileTree, link: &[u8], strip: &Path) -> Result<Entry, ActorError> {
    let target = stripped(link, strip)?.unwrap_or_default();
    match tree.get(&target) {
        Some(file @ Entry::File { .. }) => Ok(file.clone()),
        _ => Err(hostile(format!(
            "a hard link names `{}`, which is no file before it",
            target.display()
        ))),
    }
}

fn short_name(header: &[u8]) -> Vec<u8> {
    let name = text(&header[..MAX_NAME]);
    let prefix = text(&header[345..500]);
    // GNU's own headers have times where POSIX has a prefix.
    if header[257..263] != *b"ustar\0" || prefix.is_empty() {
        return name.to_vec();
    }
    [prefix, b"/", name].concat()
}

/// Returns the bytes before the first zero.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or(field)
}

fn limited(content: &[u8]) -> Result<&[u8], ActorError> {
    match content.len() > MAX_LONG {
        true => Err(hostile("it has a name that is too long".to_owned())),
        false => Ok(content),
    }
}

/// A key and its value.
type Record<'a> = (&'a [u8], &'a [u8]);

/// Returns the keys and values of an extended header: `LENGTH KEY=VALUE\n`.
fn records(mut content: &[u8]) -> Result<Vec<Record<'_>>, ActorError> {
    let broken = || hostile("it has an extended header that cannot be read".to_owned());
    let mut records = Vec::new();
    while !content.is_empty() {
        let space = content
            .iter()
            .position(|byte| *byte == b' ')
            .ok_or_else(broken)?;
        let length = usize::try_from(decimal(&content[..space])?).map_err(|_| broken())?;
        let (record, rest) = content.split_at_checked(length).ok_or_else(broken)?;
        let record = record
            .get(space + 1..)
            .and_then(|record| record.strip_suffix(b"\n"))
            .ok_or_else(broken)?;
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .ok_or_else(broken)?;
        records.push((&record[..equals], &record[equals + 1..]));
        content = rest;
    }
    Ok(records)
}

fn decimal(digits: &[u8]) -> Result<u64, ActorError> {
    std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| hostile("it has a number that is none".to_owned()))
}

/// Reads a number of a header: octal digits, or, with the first bit set, big-endian bytes.
fn number(field: &[u8]) -> Result<u64, ActorError> {
    let unreadable = || hostile("it has a number that is none".to_owned());
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        if high[0] != 0x80 || high[1..].iter().any(|byte| *byte != 0) {
            return Err(unreadable());
        }
        return Ok(u64::from_be_bytes(
            low.try_into().map_err(|_| unreadable())?,
        ));
    }
    let digits = std::str::from_utf8(text(field)).map_err(|_| unreadable())?;
    match digits.trim_matches(' ') {
        "" => Ok(0),
        digits => u64::from_str_radix(digits, 8).map_err(|_| unreadable()),
    }
}

fn sum(header: &[u8]) -> u64 {
    let bytes = header.iter().enumerate();
    bytes
        .map(|(at, byte)| {
            u64::from(if (148..156).contains(&at) {
                b' '
            } else {
                *byte
            })
        })
        .sum()
}

fn check_sum(header: &[u8]) -> Result<(), ActorError> {
    match number(&header[148..156])? == sum(header) {
        true => Ok(()),
        false => Err(hostile("it is no tar archive".to_owned())),
    }
}

/// Appends an entry, its names cut to what fits.
fn push(
    archive: &mut Vec<u8>,
    name: &[u8],
    kind: u8,
    mode: u32,
    link: &[u8],
    content: &[u8],
    owner: User,
) {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name[..name.len().min(MAX_NAME)]);
    put(100, format!("{mode:07o}").as_bytes());
    for (at, id) in [(108, owner.uid), (116, owner.gid)] {
        // Seven octal digits hold 2^21 ids; GNU's binary form holds all.
        match id < 1 << 21 {
            true => put(at, format!("{id:07o}").as_bytes()),
            false => put(at, &(0x8000_0000_0000_0000 | u64::from(id)).to_be_bytes()),
        }
    }
    put(124, format!("{:011o}", content.len()).as_bytes());
    put(136, b"00000000000");
    put(156, &[kind]);
    put(157, &link[..link.len().min(MAX_NAME)]);
    put(257, b"ustar  ");
    let sum = sum(&header);
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header[155] = b' ';
    archive.extend_from_slice(&header);
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
}

/// Reads an archive as a guest may leave it, and holds what must be so of any.
///
/// # Panics
///
/// Where that does not hold.
#[cfg(any(fuzzing, test))]
pub fn fuzz_archive(bytes: &[u8]) {
    // libFuzzer knows nothing of sums: each header's is mended, as a guest would.
    let mut archive = bytes.to_vec();
    for header in archive.chunks_exact_mut(BLOCK) {
        if header.iter().any(|byte| *byte != 0) && header[156] & 0x80 == 0 {
            header[148..156].copy_from_slice(b"        ");
            let sum = sum(header);
            header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        }
    }
    let limits = TreeLimits {
        bytes: 4096,
        entries: 16,
    };
    for archive in [bytes, &archive] {
        let Ok(tree) = FileTree::from_tar(archive, Path::new(""), limits) else {
            continue;
        };
        let sizes = tree.iter().map(|(_, entry)| match entry {
            Entry::File { bytes, .. } => bytes.len() as u64,
            Entry::Folder | Entry::Link { .. } => 0,
        });
        assert!(sizes.sum::<u64>() <= limits.bytes);
        assert!(tree.len() as u64 <= limits.entries);
        for (path, _) in tree.iter() {
            assert!(path.is_relative());
            let mut folders = path.ancestors().skip(1);
            assert!(folders.all(|folder| matches!(tree.get(folder), None | Some(Entry::Folder))));
        }
        // What was read is written, and read the same.
        let again = FileTree::from_tar(&tree.to_tar(User::default()), Path::new(""), limits);
        assert_eq!(again.ok(), Some(tree));
    }
}
