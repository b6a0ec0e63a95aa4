//! Address space for one guest at a time, and how it becomes the image again.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use super::faults::{self, Since};
use super::{Image, PAGE, Pagemap};

/// What a 32-bit memory can address: with all of it reserved, and wasmtime's guard for constant
/// offsets behind it, an access needs no bounds check.
const RESERVED: usize = 4 << 30;
/// Slots start where the kernel starts a page table, so that scans walk as few as possible.
const ALIGNMENT: usize = 2 << 20;

/// Restores after which it is looked at which pages the guest wrote. A look costs about as much as
/// the copying that it stands for.
const LOOK_EVERY: u64 = 8;
/// Looks that a page survives unchanged before it is given back.
const KEPT_LOOKS: u8 = 8;
/// The same for a page that was written for the first time; doubled each time that it comes back.
/// A page on which guests write what is there already looks unchanged.
const KEPT_LOOKS_AT_FIRST: u8 = 2;
const MAX_DOUBLINGS: u8 = 6;
/// The most pages of a slot that are kept: 4 MiB.
const MAX_KEPT: usize = 1024;

/// Changed pages beyond the image from which copies of a guest share them: 1 MiB. Sharing costs about
/// as much as one copy.
const SHARED_FROM: usize = 256;
/// Of pages that are shared already, the part that must have changed to share them anew.
const SHARED_AGAIN_FROM: usize = 8;

/// An address range, unmapped on drop. Shared by a slot and by wasmtime's view of it.
#[derive(Debug)]
struct Mapping {
    reserved: NonNull<u8>,
    reserved_length: usize,
    start: NonNull<u8>,
    image: Arc<Image>,
}

// SAFETY: an address range is not tied to a thread; who may access it is said at `Slot`.
#[expect(unsafe_code, reason = "a pointer to memory with one user at a time")]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer to memory with one user at a time")]
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(image: Arc<Image>, guard: usize) -> io::Result<Self> {
        let reserved_length = RESERVED + guard + ALIGNMENT;
        // SAFETY: a new mapping at an address of the kernel's choice.
        #[expect(unsafe_code, reason = "reserving address space")]
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                reserved_length,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let start = reserved.map_addr(|address| address.next_multiple_of(ALIGNMENT));
        let not_null = |pointer: *mut _| {
            NonNull::new(pointer).ok_or_else(|| io::Error::other("mapped at address 0"))
        };
        let mapping = Self {
            reserved: not_null(reserved.cast())?,
            reserved_length,
            start: not_null(start.cast())?,
            image,
        };
        mapping.map(&mapping.image, 0)?;
        Ok(mapping)
    }

    /// Maps an image, privately, `at` bytes from the start. No guest may run over the mapping.
    fn map(&self, image: &Image, at: usize) -> io::Result<()> {
        assert!(
            at + image.len() <= RESERVED,
            "an image within the reservation"
        );
        // SAFETY: within the reservation, and no guest runs over it.
        #[expect(unsafe_code, reason = "mapping an image over the reservation")]
        unsafe {
            rustix::mm::mmap(
                self.start.as_ptr().wrapping_add(at).cast(),
                image.len(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED,
                image,
                0,
            )
        }?;
        Ok(())
    }

    /// Addresses of the first `length` bytes.
    fn addresses(&self, length: usize) -> Range<usize> {
        let start = self.start.as_ptr().addr();
        start..start + length
    }

    /// The pages of a run of addresses.
    fn pages(&self, addresses: &Range<usize>) -> Range<usize> {
        let start = self.start.as_ptr().addr();
        (addresses.start - start) / PAGE..(addresses.end - start) / PAGE
    }

    /// Returns the memory's first `length` bytes.
    ///
    /// # Safety
    ///
    /// They must be within the image or the memory of a guest over this mapping, and nobody else
    /// may use them at the same time.
    #[expect(unsafe_code, reason = "memory that a guest may be using")]
    #[expect(clippy::mut_from_ref, reason = "who may use it is said at `Slot`")]
    unsafe fn contents(&self, length: usize) -> &mut [u8] {
        // SAFETY: mapped for the life of `self`; the rest is promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), length) }
    }

    /// Forgets everything that a guest of `size` bytes had beyond the image.
    fn shrink(&self, size: usize) -> io::Result<()> {
        let image = self.image.len();
        if size <= image {
            return Ok(());
        }
        // SAFETY: within the reservation, and no guest runs over it (see `Slot::restore`).
        #[expect(unsafe_code, reason = "mapping nothing over grown memory")]
        unsafe {
            rustix::mm::mmap_anonymous(
                self.start.as_ptr().wrapping_add(image).cast(),
                size - image,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
            )
        }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which neither a slot nor wasmtime uses any more. Nothing can be
        // done about a failure.
        #[expect(unsafe_code, reason = "unmapping our own mapping")]
        let _ = unsafe { rustix::mm::munmap(self.reserved.as_ptr().cast(), self.reserved_length) };
    }
}

/// Address space that holds the image, as far as no guest changed it.
///
/// A slot and the store of the guest over it have the same owner. Where a function reads or writes
/// the memory, it is unsafe, as its caller must hold that store and not be running it.
#[derive(Debug)]
pub(in crate::sandbox) struct Slot {
    mapping: Arc<Mapping>,
    pagemap: Option<Arc<Pagemap>>,
    /// What the memory behind the image started from, if that was more than zeros: it is shared
    /// with copies of the guest.
    grown: Option<Arc<Image>>,
    /// Looks that each page is kept for; 0 for pages that are not kept. After a restore, the kept
    /// pages are the private ones.
    kept_for: Vec<u8>,
    kept: usize,
    /// Times that each page was given back.
    returns: Vec<u8>,
    /// The kept pages, in runs.
    kept_runs: Vec<Range<usize>>,
    /// Since when only kept pages are private if there was no page fault.
    no_fault_since: Option<Since>,
    /// Since when `private` are the private pages if there was no page fault.
    known_since: Option<Since>,
    restores: u64,
    /// Restores for which the page tables were searched.
    searches: u64,
    /// The runs of private pages when they were last looked for.
    private: Vec<Range<usize>>,
}

impl Slot {
    /// Reserves address space and maps the image into it. `guard` is what wasmtime wants
    /// unmapped behind the memory.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no address space left (`ulimit -v`) or too many mappings
    /// (`vm.max_map_count`).
    pub(in crate::sandbox) fn new(
        image: &Arc<Image>,
        pagemap: Option<&Arc<Pagemap>>,
        guard: usize,
    ) -> io::Result<Self> {
        let mapping = Mapping::new(Arc::clone(image), guard)?;
        if let Some(pagemap) = pagemap {
            pagemap.map_touched_only(&mapping.addresses(image.len()));
        }
        Ok(Self {
            mapping: Arc::new(mapping),
            pagemap: pagemap.cloned(),
            grown: None,
            kept_for: vec![0; image.len() / PAGE],
            kept: 0,
            returns: vec![0; image.len() / PAGE],
            kept_runs: Vec::new(),
            no_fault_since: None,
            known_since: None,
            restores: 0,
            searches: 0,
            private: Vec::new(),
        })
    }

    /// Gives the next memory that wasmtime makes on this thread, within `instantiate`, this slot.
    pub(in crate::sandbox) fn hand_over<T>(&self, instantiate: impl FnOnce() -> T) -> T {
        HANDED_OVER.set(Some(Arc::clone(&self.mapping)));
        let result = instantiate();
        HANDED_OVER.set(None);
        result
    }

    /// Notes that the guest over a fresh slot starts to be used, on this thread.
    pub(in crate::sandbox) fn begin(&mut self) {
        self.no_fault_since = Since::last_count();
    }

    /// Notes that the guest is about to run or to be written to on this thread.
    pub(in crate::sandbox) fn use_here(&mut self) {
        if self
            .no_fault_since
            .is_some_and(|since| !since.is_on_this_thread())
        {
            self.no_fault_since = None;
        }
        if (self.known_since).is_some_and(|since| !since.is_on_this_thread()) {
            self.known_since = None;
        }
    }

    /// Makes the memory what the image is. Memory of a guest that grew it to `size` bytes is
    /// unmapped beyond the image, so that guest's store cannot be used any more.
    ///
    /// # Safety
    ///
    /// The caller must own the store of the guest over this slot, and must not be running it.
    #[expect(unsafe_code, reason = "writes memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn restore(&mut self, size: usize) -> io::Result<()> {
        self.mapping.shrink(size)?;
        self.grown = None;
        let mapping = Arc::clone(&self.mapping);
        // SAFETY: as promised by the caller; the image is part of every memory.
        let memory = unsafe { mapping.contents(mapping.image.len()) };
        let Some(pagemap) = self.pagemap.clone() else {
            return give_back(memory);
        };
        pagemap.check_process()?;
        self.restores += 1;
        let known_since = self.known_since.take();
        let looks = self.restores.is_multiple_of(LOOK_EVERY);
        let is_without_faults = pagemap.counts_faults()
            && self
                .no_fault_since
                .take()
                .is_some_and(|since| since.is_without_faults());
        if is_without_faults && !looks {
            for run in &self.kept_runs {
                let run = bytes(run.clone());
                memory[run.clone()].copy_from_slice(&mapping.image.bytes()[run]);
            }
            return Ok(());
        }
        let mut private = std::mem::take(&mut self.private);
        if is_without_faults {
            private.clear();
            private.append(&mut self.kept_runs);
        } else if known_since.is_some_and(|since| since.is_without_faults()) {
            // Beyond the image there is nothing any more.
            let image = memory.len() / PAGE;
            private.retain(|run| run.start < image);
            if let Some(last) = private.last_mut() {
                last.end = last.end.min(image);
            }
        } else {
            self.searches += 1;
            private.clear();
            pagemap.private_pages(mapping.addresses(memory.len()), &mut private)?;
            for run in &mut private {
                *run = mapping.pages(run);
            }
        }
        for run in &private {
            if looks {
                self.look_and_restore(memory, run.clone())?;
            } else {
                self.copy_or_give_back(memory, run.clone())?;
            }
        }
        self.private = private;
        self.find_kept_runs();
        faults::recount();
        Ok(())
    }

    fn find_kept_runs(&mut self) {
        self.kept_runs.clear();
        for page in self.private.iter().cloned().flatten() {
            if self.kept_for[page] == 0 {
                continue;
            }
            match self.kept_runs.last_mut() {
                Some(run) if run.end == page => run.end = page + 1,
                _ => self.kept_runs.push(page..page + 1),
            }
        }
    }

    #[cfg(test)]
    pub(super) fn searches(&self) -> u64 {
        self.searches
    }

    /// Restores a run of private pages, by copying unless too many are kept already.
    fn copy_or_give_back(&mut self, memory: &mut [u8], run: Range<usize>) -> io::Result<()> {
        let mut copied = run.start..run.start;
        for page in run.clone() {
            if self.kept_for[page] == 0 {
                if self.kept == MAX_KEPT {
                    break;
                }
                self.kept += 1;
                self.kept_for[page] = self.looks_at_first(page);
            }
            copied.end = page + 1;
        }
        let rest = bytes(copied.end..run.end);
        let copied = bytes(copied);
        memory[copied.clone()].copy_from_slice(&self.mapping.image.bytes()[copied]);
        give_back(&mut memory[rest])
    }

    /// Returns the looks that a page is kept for which was not kept before.
    fn looks_at_first(&self, page: usize) -> u8 {
        KEPT_LOOKS_AT_FIRST << self.returns[page]
    }

    /// As [`Self::copy_or_give_back`], and learns from each page whether the guest wrote it.
    fn look_and_restore(&mut self, memory: &mut [u8], run: Range<usize>) -> io::Result<()> {
        let mut given_back = run.start..run.start;
        for page in run {
            let content = &mut memory[bytes(page..page + 1)];
            let original = self.mapping.image.page(page);
            let is_written = content != original;
            let was_kept = self.kept_for[page] > 0;
            let looks = match (was_kept, is_written) {
                (false, _) => self.looks_at_first(page),
                (true, true) => self.kept_for[page].max(KEPT_LOOKS),
                (true, false) => self.kept_for[page] - 1,
            };
            let is_kept = looks > 0 && (was_kept || self.kept < MAX_KEPT);
            self.kept_for[page] = if is_kept { looks } else { 0 };
            self.returns[page] += u8::from(!is_kept && self.returns[page] < MAX_DOUBLINGS);
            self.kept = self.kept + usize::from(is_kept) - usize::from(was_kept);
            if is_kept && is_written {
                content.copy_from_slice(original);
            } else if !is_kept && given_back.end == page {
                given_back.end = page + 1;
            } else if !is_kept {
                give_back(&mut memory[bytes(given_back)])?;
                given_back = page..page + 1;
            }
        }
        give_back(&mut memory[bytes(given_back)])
    }

    /// Compares all of a restored slot with the image.
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`].
    #[expect(unsafe_code, reason = "reads memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn is_restored(&mut self) -> io::Result<bool> {
        let image = &self.mapping.image;
        // SAFETY: as promised by the caller; the image is part of every memory.
        let memory = unsafe { self.mapping.contents(image.len()) };
        let is_restored = memory == image.bytes();
        // Reading has mapped every page, which would make each later scan long.
        for page in 0..self.kept_for.len() {
            if self.kept_for[page] == 0 {
                give_back(&mut memory[bytes(page..page + 1)])?;
            }
        }
        faults::recount();
        Ok(is_restored)
    }

    /// Lets copies of a guest of `size` bytes share what it has beyond the image, if that is much.
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`]; the guest's memory must have that size.
    #[expect(unsafe_code, reason = "reads memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn share_grown(&mut self, size: usize) -> io::Result<()> {
        let start = self.mapping.image.len();
        if size == start {
            return Ok(());
        }
        let changed: usize = self.private_runs(start..size)?.iter().map(Range::len).sum();
        let shared = self.grown.as_ref().map_or(0, |grown| grown.len() / PAGE);
        if changed < SHARED_FROM.max(shared / SHARED_AGAIN_FROM) {
            return Ok(());
        }
        // SAFETY: as promised by the caller.
        let memory = unsafe { self.mapping.contents(size) };
        let grown = Arc::new(Image::new(&memory[start..])?);
        self.mapping.map(&grown, start)?;
        self.grown = Some(grown);
        Ok(())
    }

    /// Returns the runs of pages within `bytes` that may differ from what they started from.
    fn private_runs(&self, bytes: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let mut runs = Vec::new();
        let Some(pagemap) = &self.pagemap else {
            runs.push(bytes.start / PAGE..bytes.end / PAGE);
            return Ok(runs);
        };
        pagemap.check_process()?;
        let start = self.mapping.start.as_ptr().addr();
        pagemap.private_pages(start + bytes.start..start + bytes.end, &mut runs)?;
        for run in &mut runs {
            *run = self.mapping.pages(run);
        }
        Ok(runs)
    }

    /// Returns what a guest of `size` bytes changed.
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`]; the guest's memory must have that size.
    #[expect(unsafe_code, reason = "reads memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn changed(&self, size: usize) -> io::Result<Changed<'_>> {
        Ok(Changed {
            // SAFETY: as promised by the caller.
            memory: unsafe { self.mapping.contents(size) },
            image: &self.mapping.image,
            grown: self.grown.as_ref(),
            runs: self.private_runs(0..size)?,
        })
    }

    /// Makes a fresh guest of `size` bytes over this slot what the one with `changed` is.
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`]; the guest's memory must have that size.
    #[expect(unsafe_code, reason = "writes memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn copy_from(
        &mut self,
        changed: &Changed<'_>,
        size: usize,
    ) -> io::Result<()> {
        assert_eq!(size, changed.memory.len());
        if let Some(grown) = changed.grown {
            self.mapping.map(grown, changed.image.len())?;
            self.grown = Some(Arc::clone(grown));
        }
        // SAFETY: as promised by the caller.
        let memory = unsafe { self.mapping.contents(size) };
        for page in changed.runs.iter().cloned().flatten() {
            // A page that is kept costs as much to compare as to copy; any other one, a fault.
            let is_kept = self.kept_for.get(page).is_some_and(|&looks| looks > 0);
            if is_kept || changed.differs(page) {
                memory[bytes(page..page + 1)].copy_from_slice(changed.page(page));
            }
        }
        Ok(())
    }

    /// Returns whether a guest can be taken back to what it was without being made fresh in between:
    /// where the kernel tells which pages it wrote.
    pub(in crate::sandbox) fn rewinds(&self) -> bool {
        // What is shared with copies of the guest is not private, and no mark has it.
        self.pagemap.is_some() && self.grown.is_none()
    }

    /// Returns the pages of a guest of `size` bytes that may differ from what they started from, with
    /// their content, to take it back to with [`Self::rewind`].
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`]; the guest's memory must have that size.
    #[expect(unsafe_code, reason = "reads memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn mark(
        &mut self,
        size: usize,
    ) -> io::Result<(Vec<usize>, Vec<u8>)> {
        self.find_private(size)?;
        // SAFETY: as promised by the caller.
        let memory = unsafe { self.mapping.contents(size) };
        let pages: Vec<usize> = self.private.iter().cloned().flatten().collect();
        let mut content = Vec::with_capacity(pages.len() * PAGE);
        for run in &self.private {
            content.extend_from_slice(&memory[bytes(run.clone())]);
        }
        self.private_are_known();
        Ok((pages, content))
    }

    /// Makes a guest of `size` bytes what it was when it was marked.
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`]; the guest's memory must have that size, and must have had it when it
    /// was marked.
    #[expect(unsafe_code, reason = "writes memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn rewind(
        &mut self,
        size: usize,
        pages: &[usize],
        content: &[u8],
    ) -> io::Result<()> {
        self.find_private(size)?;
        // SAFETY: as promised by the caller.
        let memory = unsafe { self.mapping.contents(size) };
        let image = &self.mapping.image;
        let mut marked = (pages.iter().copied())
            .zip(content.chunks_exact(PAGE))
            .peekable();
        let mut write = |page: usize, content: &[u8]| {
            memory[bytes(page..page + 1)].copy_from_slice(content);
        };
        // The kernel may take back a page of zeros that was private; it is written like any other.
        let mut is_as_found = true;
        for page in self.private.iter().cloned().flatten() {
            while let Some((marked, content)) = marked.next_if(|(marked, _)| *marked < page) {
                write(marked, content);
                is_as_found = false;
            }
            match marked.next_if(|(marked, _)| *marked == page) {
                Some((_, content)) => write(page, content),
                None if page < image.len() / PAGE => write(page, image.page(page)),
                None => write(page, &[0; PAGE]),
            }
        }
        for (page, content) in marked {
            write(page, content);
            is_as_found = false;
        }
        if !is_as_found {
            return Ok(());
        }
        self.private_are_known();
        Ok(())
    }

    /// Looks for the private pages of a guest of `size` bytes, unless they are known.
    fn find_private(&mut self, size: usize) -> io::Result<()> {
        let is_quiet = |since: Option<Since>| since.is_some_and(|since| since.is_without_faults());
        // Beyond the image, the kernel may make a huge page of small ones, and so fill the gaps between
        // them, without a fault.
        let is_image = size == self.mapping.image.len();
        if is_quiet(self.known_since.take()) && is_image {
            return Ok(());
        }
        let counts = (self.pagemap.as_ref()).is_some_and(|pagemap| pagemap.counts_faults());
        if counts && is_image && is_quiet(self.no_fault_since) {
            self.private.clone_from(&self.kept_runs);
        } else {
            self.searches += 1;
            self.private = self.private_runs(0..size)?;
        }
        Ok(())
    }

    fn private_are_known(&mut self) {
        let counts = (self.pagemap.as_ref()).is_some_and(|pagemap| pagemap.counts_faults());
        faults::recount();
        self.known_since = Since::last_count().filter(|_| counts);
    }

    /// Sets the content of pages of a guest of `size` bytes.
    ///
    /// # Safety
    ///
    /// As for [`Self::restore`]; the guest's memory must have that size.
    #[expect(unsafe_code, reason = "writes memory that a guest may be using")]
    pub(in crate::sandbox) unsafe fn write(
        &mut self,
        size: usize,
        pages: &[usize],
        content: &[u8],
    ) {
        // SAFETY: as promised by the caller.
        let memory = unsafe { self.mapping.contents(size) };
        for (&page, content) in pages.iter().zip(content.chunks(PAGE)) {
            memory[bytes(page..page + 1)].copy_from_slice(content);
        }
    }
}

/// What a guest at rest changed in its memory.
#[derive(Debug)]
pub(in crate::sandbox) struct Changed<'a> {
    memory: &'a [u8],
    image: &'a Image,
    /// What the memory behind the image started from, if not from zeros.
    grown: Option<&'a Arc<Image>>,
    /// Runs of pages that may differ from what they started from.
    runs: Vec<Range<usize>>,
}

impl Changed<'_> {
    /// Returns the indices and the content of pages that differ from the image, which is zeros
    /// beyond its end, in order.
    pub(in crate::sandbox) fn pages(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let image = self.image.len() / PAGE;
        let grown = image..image + self.grown.map_or(0, |grown| grown.len() / PAGE);
        let runs = self.runs.iter().cloned().flatten();
        let before = runs.clone().filter(move |&page| page < image);
        let behind = runs.filter(move |&page| page >= grown.end);
        before
            .filter(|&page| self.differs(page))
            .chain(
                grown
                    .clone()
                    .chain(behind)
                    .filter(|&page| self.page(page) != [0; PAGE]),
            )
            .map(|page| (page, self.page(page)))
    }

    /// Returns whether a page differs from what it started from.
    fn differs(&self, page: usize) -> bool {
        let image = self.image.len() / PAGE;
        if page < image {
            return self.page(page) != self.image.page(page);
        }
        match self.grown {
            Some(grown) if page - image < grown.len() / PAGE => {
                self.page(page) != grown.page(page - image)
            }
            _ => self.page(page) != [0; PAGE],
        }
    }

    fn page(&self, page: usize) -> &[u8] {
        &self.memory[bytes(page..page + 1)]
    }
}

/// The bytes of a range of pages.
fn bytes(pages: Range<usize>) -> Range<usize> {
    pages.start * PAGE..pages.end * PAGE
}

/// Gives whole pages of a slot back to the kernel: the next access finds the image's.
fn give_back(pages: &mut [u8]) -> io::Result<()> {
    if pages.is_empty() {
        return Ok(());
    }
    // SAFETY: changes the content of memory that is borrowed mutably.
    #[expect(unsafe_code, reason = "giving memory back")]
    unsafe {
        rustix::mm::madvise(
            pages.as_mut_ptr().cast(),
            pages.len(),
            Advice::LinuxDontNeed,
        )
    }?;
    Ok(())
}

thread_local! {
    /// The slot for the memory that is about to be made on this thread.
    static HANDED_OVER: RefCell<Option<Arc<Mapping>>> = const { RefCell::new(None) };
}

/// Makes wasmtime use the slot that was [handed over](Slot::hand_over).
#[derive(Debug)]
pub(in crate::sandbox) struct Creator;

// SAFETY: `Mapping` has the reservation and the guard that are asked for, and never moves. Its
// content is the image's rather than zeros, which the guest is made for: it has no data segments.
#[expect(unsafe_code, reason = "memory for wasmtime")]
unsafe impl MemoryCreator for Creator {
    fn new_memory(
        &self,
        _: MemoryType,
        minimum: usize,
        _: Option<usize>,
        reserved: Option<usize>,
        guard: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        // A store whose guest may throw asks for memory for its exceptions as well, without a guard.
        if guard == 0 {
            return Ok(Box::new(ExceptionHeap::new(minimum, reserved)?));
        }
        let mapping = HANDED_OVER.take().ok_or("no slot was handed over")?;
        let image = mapping.image.len();
        if minimum > image {
            return Err(format!(
                "a memory of {minimum} bytes for an image of {image}"
            ));
        }
        if reserved.unwrap_or(0) + guard + ALIGNMENT > mapping.reserved_length {
            return Err(format!("{reserved:?} and {guard} bytes are wanted"));
        }
        Ok(Box::new(SlotMemory {
            mapping,
            size: minimum,
        }))
    }
}

/// The most bytes of the exceptions that one guest has in flight. They are collected when it is
/// full, and what is in flight is bounded by the stack.
pub(in crate::sandbox) const EXCEPTIONS: usize = 16 << 20;

/// Memory for a store's exceptions: all of it there from the start, and never moved.
#[derive(Debug)]
struct ExceptionHeap {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: an address range is not tied to a thread; only the store that owns the heap uses it.
#[expect(unsafe_code, reason = "a pointer to memory with one user at a time")]
unsafe impl Send for ExceptionHeap {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer to memory with one user at a time")]
unsafe impl Sync for ExceptionHeap {}

impl ExceptionHeap {
    fn new(size: usize, reserved: Option<usize>) -> Result<Self, String> {
        let wanted = size.max(reserved.unwrap_or(0));
        if wanted > EXCEPTIONS {
            return Err(format!("{wanted} bytes are too many for exceptions"));
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        #[expect(unsafe_code, reason = "mapping memory")]
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                EXCEPTIONS,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let start = start.map_err(|error| error.to_string())?;
        let start = NonNull::new(start.cast()).ok_or("mapped at address 0")?;
        Ok(Self { start, size })
    }
}

impl Drop for ExceptionHeap {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and wasmtime is done with it. Nothing can be done about a
        // failure.
        #[expect(unsafe_code, reason = "unmapping our own mapping")]
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), EXCEPTIONS) };
    }
}

// SAFETY: `EXCEPTIONS` bytes are accessible for the life of the heap, at the same place.
#[expect(unsafe_code, reason = "memory for wasmtime")]
unsafe impl LinearMemory for ExceptionHeap {
    fn byte_size(&self) -> usize {
        self.size
    }

    fn byte_capacity(&self) -> usize {
        EXCEPTIONS
    }

    fn grow_to(&mut self, size: usize) -> wasmtime::Result<()> {
        if size > EXCEPTIONS {
            return Err(wasmtime::Error::msg("too many exceptions at once"));
        }
        self.size = size;
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// A slot as wasmtime sees it.
struct SlotMemory {
    mapping: Arc<Mapping>,
    /// Less than the image until the memory has grown to it, which changes no content.
    size: usize,
}

// SAFETY: `size` bytes are accessible, the rest of the reservation is not.
#[expect(unsafe_code, reason = "memory for wasmtime")]
unsafe impl LinearMemory for SlotMemory {
    fn byte_size(&self) -> usize {
        self.size
    }

    fn byte_capacity(&self) -> usize {
        RESERVED
    }

    fn grow_to(&mut self, size: usize) -> wasmtime::Result<()> {
        if size > RESERVED {
            return Err(wasmtime::Error::msg("beyond the reservation"));
        }
        // SAFETY: within the reservation; wasmtime grows to whole pages, and never shrinks.
        #[expect(unsafe_code, reason = "growing a mapping")]
        unsafe {
            let start = self.mapping.start.as_ptr().wrapping_add(self.size);
            rustix::mm::mprotect(
                start.cast(),
                size - self.size,
                MprotectFlags::READ | MprotectFlags::WRITE,
            )
        }?;
        self.size = size;
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.mapping.start.as_ptr()
    }
}
