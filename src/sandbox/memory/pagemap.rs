//! Which pages of a mapping are private copies, from the kernel's page tables.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::ioctl::{Ioctl, Opcode, Updater, opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags, UserfaultfdFlags};

use super::faults;

// Page categories (linux/fs.h).
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO_PAGE: u64 = 1 << 5;

/// Runs of pages that one call reports.
const RUNS: usize = 512;

/// The kernel's answer to "which of these pages are ours alone?", by the `PAGEMAP_SCAN` ioctl
/// (Linux 6.7).
#[derive(Debug)]
pub(in crate::sandbox) struct Pagemap {
    file: File,
    /// Registered ranges have no fault-around: only pages really touched are mapped, which keeps
    /// scans short. Without permission for it, scans are some microseconds longer.
    touched_only: Option<OwnedFd>,
    counts_faults: bool,
    process: ProcessMark,
}

impl Pagemap {
    /// Opens the page map of this process, if this kernel can scan it.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no `/proc` or the kernel is older than 6.7.
    pub(in crate::sandbox) fn open() -> io::Result<Self> {
        let process = ProcessMark::new()?;
        let pagemap = Self {
            file: fs_err::File::open("/proc/self/pagemap")?.into_file(),
            touched_only: userfaultfd().ok(),
            counts_faults: faults::are_counted(|| process.set()),
            process,
        };
        pagemap.private_pages(0..super::PAGE, &mut Vec::new())?;
        Ok(pagemap)
    }

    /// Returns whether the kernel counts the page faults of threads.
    pub(super) fn counts_faults(&self) -> bool {
        self.counts_faults
    }

    /// Turns fault-around off for a mapping, if that is allowed.
    pub(super) fn map_touched_only(&self, range: &Range<usize>) {
        if let Some(descriptor) = &self.touched_only {
            // A refusal costs time in later scans, nothing else.
            let _ = register(descriptor, range);
        }
    }

    /// Checks that this is the process whose page map this is: not one that was forked from it,
    /// whose pages it would say nothing about.
    pub(super) fn check_process(&self) -> io::Result<()> {
        if self.process.is_here() {
            Ok(())
        } else {
            Err(io::Error::other(
                "the process was forked after the runtime was loaded; load one in the child",
            ))
        }
    }

    /// Appends the runs of pages in `range` that are private copies or anonymous, in order, as
    /// addresses.
    pub(super) fn private_pages(
        &self,
        range: Range<usize>,
        found: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        let mut start = range.start;
        let mut runs = [Run::default(); RUNS];
        while start < range.end {
            let scan = Scan(ScanArguments {
                size: size_of::<ScanArguments>() as u64,
                start: start as u64,
                end: range.end as u64,
                vec: runs.as_mut_ptr() as u64,
                vec_len: RUNS as u64,
                category_inverted: IS_FILE | IS_ZERO_PAGE,
                category_mask: IS_FILE | IS_ZERO_PAGE,
                category_any: IS_PRESENT | IS_SWAPPED,
                ..ScanArguments::default()
            });
            // SAFETY: the argument is the one this ioctl has, and `vec` points to `RUNS` runs.
            #[expect(unsafe_code, reason = "an ioctl")]
            let (count, walked_to) = unsafe { rustix::ioctl::ioctl(&self.file, scan) }?;
            for run in &runs[..count] {
                let run = address(run.start)?..address(run.end)?;
                // A run may be cut in two by the end of `runs`.
                match found.last_mut() {
                    Some(last) if last.end == run.start => last.end = run.end,
                    _ => found.push(run),
                }
            }
            start = address(walked_to)?;
        }
        Ok(())
    }
}

fn address(value: u64) -> io::Result<usize> {
    usize::try_from(value).map_err(io::Error::other)
}

/// `struct page_region`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any: u64,
    return_mask: u64,
}

struct Scan(ScanArguments);

// SAFETY: the opcode is PAGEMAP_SCAN's and the pointer is to its argument, which the kernel
// changes.
#[expect(unsafe_code, reason = "an ioctl")]
unsafe impl Ioctl for Scan {
    /// Runs found, and the address up to which was looked.
    type Output = (usize, u64);

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<ScanArguments>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(
        count: c_int,
        argument: *mut c_void,
    ) -> rustix::io::Result<Self::Output> {
        // SAFETY: the pointer of `as_ptr`.
        let walked_to = unsafe { (*argument.cast::<ScanArguments>()).walk_end };
        let count = usize::try_from(count).map_err(|_| rustix::io::Errno::INVAL)?;
        Ok((count, walked_to))
    }
}

/// A byte that the kernel sets to zero in a forked process.
#[derive(Debug)]
struct ProcessMark(NonNull<u8>);

// SAFETY: the byte is only read once it is shared.
#[expect(unsafe_code, reason = "a pointer to a byte that nobody writes")]
unsafe impl Send for ProcessMark {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer to a byte that nobody writes")]
unsafe impl Sync for ProcessMark {}

impl ProcessMark {
    fn new() -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        #[expect(unsafe_code, reason = "mapping a page")]
        let page = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                super::PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let mark = Self(NonNull::new(page.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?);
        // SAFETY: the mapping just made, which holds nothing yet.
        #[expect(unsafe_code, reason = "what becomes of a page in a forked process")]
        unsafe { rustix::mm::madvise(page, super::PAGE, Advice::LinuxWipeOnFork) }?;
        Ok(mark)
    }

    /// Marks this process, before others can read the mark: the first write to its page.
    fn set(&self) {
        // SAFETY: writable, and nobody else has the pointer yet.
        #[expect(unsafe_code, reason = "setting the byte")]
        unsafe {
            self.0.as_ptr().write_volatile(1);
        }
    }

    fn is_here(&self) -> bool {
        // SAFETY: mapped for the life of `self`.
        #[expect(unsafe_code, reason = "reading the byte")]
        unsafe {
            self.0.as_ptr().read_volatile() == 1
        }
    }
}

impl Drop for ProcessMark {
    fn drop(&mut self) {
        // SAFETY: our own mapping. Nothing can be done about a failure.
        #[expect(unsafe_code, reason = "unmapping our own mapping")]
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), super::PAGE) };
    }
}

// ---- userfaultfd, of which only a side effect is wanted: no fault-around in registered ranges

const API: u8 = 0xaa;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;

/// `struct uffdio_api`.
#[repr(C)]
struct UserfaultfdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

fn userfaultfd() -> io::Result<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(1); // user mode only
    // SAFETY: no range is registered for faults that somebody would have to handle.
    #[expect(unsafe_code, reason = "a file descriptor for later ioctls")]
    let descriptor = unsafe { rustix::mm::userfaultfd(flags) }?;
    let mut api = UserfaultfdApi {
        api: API.into(),
        features: FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED | FEATURE_WP_HUGETLBFS_SHMEM,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_API and its argument.
    #[expect(unsafe_code, reason = "an ioctl")]
    let call =
        unsafe { Updater::<{ opcode::read_write::<UserfaultfdApi>(API, 0x3f) }, _>::new(&mut api) };
    // SAFETY: as above.
    #[expect(unsafe_code, reason = "an ioctl")]
    unsafe { rustix::ioctl::ioctl(&descriptor, call) }?;
    Ok(descriptor)
}

fn register(descriptor: &OwnedFd, range: &Range<usize>) -> io::Result<()> {
    let mut argument = Register {
        start: range.start as u64,
        length: range.len() as u64,
        mode: REGISTER_MODE_WP,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_REGISTER and its argument. Nothing is ever write-protected, so no fault waits
    // for a handler.
    #[expect(unsafe_code, reason = "an ioctl")]
    let call =
        unsafe { Updater::<{ opcode::read_write::<Register>(API, 0) }, _>::new(&mut argument) };
    // SAFETY: as above.
    #[expect(unsafe_code, reason = "an ioctl")]
    unsafe { rustix::ioctl::ioctl(descriptor, call) }?;
    Ok(())
}
