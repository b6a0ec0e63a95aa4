//! The frozen memory that every guest starts from.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::{PAGE, WASM_PAGE};

/// Memory content in a file that never changes, mapped for reading.
#[derive(Debug)]
pub(in crate::sandbox) struct Image {
    file: File,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is read-only for as long as the image lives.
#[expect(unsafe_code, reason = "a pointer to memory that never changes")]
unsafe impl Send for Image {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer to memory that never changes")]
unsafe impl Sync for Image {}

impl Image {
    /// Keeps `content`, whole Wasm pages, in a file of this process.
    pub(in crate::sandbox) fn new(content: &[u8]) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("wardian-image", flags)?);
        write_sparse(&file, content)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Self::map(file)
    }

    /// Maps a file that holds a memory's content.
    ///
    /// The file must not be changed by anybody while the image lives.
    pub(in crate::sandbox) fn map(file: File) -> io::Result<Self> {
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if length == 0 || length % WASM_PAGE != 0 {
            return Err(io::Error::other(format!(
                "a memory image has whole Wasm pages, this one has {length} bytes"
            )));
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        #[expect(unsafe_code, reason = "mapping a file")]
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self {
            file,
            start,
            length,
        })
    }

    /// Returns the number of bytes.
    pub(in crate::sandbox) fn len(&self) -> usize {
        self.length
    }

    /// Returns the content.
    pub(in crate::sandbox) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, readable and unchanging for the life of `self`.
        #[expect(unsafe_code, reason = "a mapping seen as a slice")]
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr(), self.length)
        }
    }

    /// Returns the content of one page.
    pub(super) fn page(&self, index: usize) -> &[u8] {
        &self.bytes()[index * PAGE..(index + 1) * PAGE]
    }
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no slice of it outlives `self`. Nothing can be done about a
        // failure.
        #[expect(unsafe_code, reason = "unmapping our own mapping")]
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Writes `content` to an empty file, leaving holes for pages of zeros.
pub(in crate::sandbox) fn write_sparse(file: &File, content: &[u8]) -> io::Result<()> {
    file.set_len(content.len() as u64)?;
    for (index, page) in content.chunks(PAGE).enumerate() {
        if page.iter().any(|&byte| byte != 0) {
            file.write_all_at(page, (index * PAGE) as u64)?;
        }
    }
    Ok(())
}
