//! Whether a thread met page faults: without one, no page has become private.
//!
//! A page of a private mapping becomes the mapping's own when it is first written, by a page
//! fault, and the kernel counts a thread's page faults (`getrusage`). So if a guest ran on one
//! thread and that thread's count stands where it stood, the guest wrote to no page that was not
//! private before, and the page tables need not be searched: that search is half of what restoring
//! after a short program takes.

use std::cell::Cell;
use std::io;
use std::thread::ThreadId;

thread_local! {
    /// This thread's count when it was last asked for.
    static LAST: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A time from which on the faults of one thread are of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Since {
    thread: ThreadId,
    count: u64,
}

impl Since {
    /// Begins now, or at the last count on this thread, which costs nothing. `None` if there was
    /// none.
    pub(super) fn last_count() -> Option<Self> {
        Some(Self {
            thread: std::thread::current().id(),
            count: LAST.get()?,
        })
    }

    /// Returns whether this is the thread whose faults are counted.
    pub(super) fn is_on_this_thread(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    /// Returns whether this thread met no page fault since.
    pub(super) fn is_without_faults(&self) -> bool {
        self.is_on_this_thread() && count().is_ok_and(|count| count == self.count)
    }
}

/// Counts anew, after faults that are no guest's.
pub(super) fn recount() {
    LAST.set(count().ok());
}

/// Checks that the kernel counts: some that pass for Linux do not. `first_write` is to write to a
/// page for the first time; memory from an allocator may have been written to before.
pub(super) fn are_counted(first_write: impl FnOnce()) -> bool {
    let counted = || -> io::Result<bool> {
        let before = count()?;
        first_write();
        Ok(count()? > before)
    };
    counted().unwrap_or(false)
}

/// Returns how many page faults the calling thread has met.
fn count() -> io::Result<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the pointer is to a `rusage`, which the kernel fills.
    #[expect(unsafe_code, reason = "a system call")]
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: filled, as the call succeeded.
    #[expect(unsafe_code, reason = "filled by a system call")]
    let usage = unsafe { usage.assume_init() };
    Ok((usage.ru_minflt + usage.ru_majflt).cast_unsigned())
}
