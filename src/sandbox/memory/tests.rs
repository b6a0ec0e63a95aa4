use std::sync::Arc;

use wasmtime::{Config, Engine, Instance, Memory, Module, Store};

use super::*;

const GUARD: usize = 32 << 20;
/// The image of the tests: four Wasm pages that count.
const SIZE: usize = 4 * WASM_PAGE;

fn image() -> Arc<Image> {
    let content: Vec<u8> = (0..SIZE / PAGE)
        .flat_map(|page| [u8::try_from(page).unwrap(); PAGE])
        .collect();
    Arc::new(Image::new(&content).unwrap())
}

/// A guest over a slot, as `Instance` owns it.
struct Guest {
    store: Store<()>,
    memory: Memory,
    slot: Slot,
}

impl Guest {
    fn new(pagemap: Option<&Arc<Pagemap>>) -> Self {
        let mut config = Config::new();
        config
            .memory_reservation(4 << 30)
            .memory_guard_size(GUARD as u64)
            .memory_may_move(false)
            .with_host_memory(Arc::new(Creator));
        let engine = Engine::new(&config).unwrap();
        let wasm = wat::parse_str(r#"(module (memory (export "memory") 4))"#).unwrap();
        let module = Module::new(&engine, wasm).unwrap();
        let slot = Slot::new(&image(), pagemap, GUARD).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = slot
            .hand_over(|| Instance::new(&mut store, &module, &[]))
            .unwrap();
        let memory = instance.get_memory(&mut store, "memory").unwrap();
        Self {
            store,
            memory,
            slot,
        }
    }

    fn write(&mut self, page: usize, byte: u8) {
        self.memory.data_mut(&mut self.store)[page * PAGE + 7] = byte;
    }

    #[expect(unsafe_code, reason = "the store is at rest")]
    fn restore(&mut self) {
        let size = self.memory.data_size(&self.store);
        // SAFETY: the store is at rest and borrowed.
        unsafe { self.slot.restore(size) }.unwrap();
    }

    #[expect(unsafe_code, reason = "the store is at rest")]
    fn is_restored(&mut self) -> bool {
        // SAFETY: the store is at rest and borrowed.
        unsafe { self.slot.is_restored() }.unwrap()
    }

    #[expect(unsafe_code, reason = "the store is at rest")]
    fn mark(&mut self) -> (Vec<usize>, Vec<u8>) {
        let size = self.memory.data_size(&self.store);
        // SAFETY: the store is at rest and borrowed.
        unsafe { self.slot.mark(size) }.unwrap()
    }

    #[expect(unsafe_code, reason = "the store is at rest")]
    fn rewind(&mut self, (pages, content): &(Vec<usize>, Vec<u8>)) {
        let size = self.memory.data_size(&self.store);
        // SAFETY: the store is at rest and borrowed; no test grows it after marking it.
        unsafe { self.slot.rewind(size, pages, content) }.unwrap();
    }

    /// Grows the memory by `pages` Wasm pages.
    fn grow(&mut self, pages: u64) {
        self.memory.grow(&mut self.store, pages).unwrap();
    }

    /// Makes a copy, as a fork does.
    #[expect(unsafe_code, reason = "the stores are at rest")]
    fn copy(&mut self, pagemap: Option<&Arc<Pagemap>>) -> Self {
        let size = self.memory.data_size(&self.store);
        let mut copy = Self::new(pagemap);
        copy.grow(((size - SIZE) / WASM_PAGE) as u64);
        // SAFETY: the store is at rest and borrowed.
        unsafe { self.slot.share_grown(size) }.unwrap();
        // SAFETY: as above.
        let changed = unsafe { self.slot.changed(size) }.unwrap();
        // SAFETY: as above.
        unsafe { copy.slot.copy_from(&changed, size) }.unwrap();
        copy
    }

    fn data(&self) -> &[u8] {
        self.memory.data(&self.store)
    }

    #[expect(unsafe_code, reason = "the store is at rest")]
    fn changed(&self) -> Vec<usize> {
        let size = self.memory.data_size(&self.store);
        // SAFETY: the store is at rest and borrowed.
        let changed = unsafe { self.slot.changed(size) }.unwrap();
        changed.pages().map(|(page, _)| page).collect()
    }
}

/// With and without the kernel's help, where it gives any.
fn pagemaps() -> Vec<Option<Arc<Pagemap>>> {
    let scanned = Pagemap::open().ok().map(Arc::new);
    if scanned.is_none() {
        println!("skipped in part: this kernel has no PAGEMAP_SCAN");
    }
    [scanned.map(Some), Some(None)]
        .into_iter()
        .flatten()
        .collect()
}

#[test]
fn a_guest_starts_from_the_image() {
    let guest = Guest::new(None);
    assert_eq!(guest.memory.data(&guest.store), image().bytes());
}

#[test]
fn what_was_written_is_restored() {
    for pagemap in pagemaps() {
        let mut guest = Guest::new(pagemap.as_ref());
        // Many rounds, so that pages become kept, are looked at, and are given back.
        for round in 0..100 {
            guest.write(3, 0xff);
            guest.write(round % 50, 0xee);
            assert!(!guest.is_restored(), "the comparison sees it");
            guest.restore();
            assert!(guest.is_restored(), "round {round}");
        }
    }
}

#[test]
fn a_guest_goes_back_to_where_it_was_marked() {
    for pagemap in pagemaps() {
        let Some(pagemap) = pagemap else { continue };
        for grown in [0, 2] {
            let mut guest = Guest::new(Some(&pagemap));
            for round in 0..50 {
                guest.slot.begin();
                guest.grow(if round == 0 { grown } else { 0 });
                guest.write(3, 1);
                guest.write(round % 40, 2);
                let last = guest.data().len() / PAGE - 1;
                guest.write(last, 3);
                let before = guest.data().to_vec();
                let mark = guest.mark();
                for again in 0..3 {
                    guest.write(3, 0xff);
                    // Pages that were not written before, and none at all.
                    if again < 2 {
                        guest.write((round + again) % 50, 0xee);
                        guest.write(last - again, 0xdd);
                    }
                    guest.rewind(&mark);
                    assert!(guest.data() == before, "round {round}, {again}");
                }
                if grown == 0 {
                    guest.restore();
                    assert!(guest.is_restored(), "round {round}");
                }
            }
        }
    }
}

#[test]
fn going_back_without_a_fault_searches_nothing() {
    let Some(mut guest) = guest_with_a_kept_page() else {
        return;
    };
    guest.slot.begin();
    let searches = guest.slot.searches();
    guest.write(3, 4);
    let mark = guest.mark();
    for _ in 0..3 {
        guest.write(3, 5);
        guest.rewind(&mark);
        assert_eq!(guest.data()[3 * PAGE + 7], 4);
    }
    assert_eq!(guest.slot.searches(), searches);
    // A page that is written for the first time is found.
    guest.write(9, 5);
    guest.rewind(&mark);
    assert_eq!(guest.data()[9 * PAGE + 7], 9);
    assert_eq!(guest.slot.searches(), searches + 1);
    guest.restore();
    assert!(guest.is_restored());
}

/// A guest whose page 3 is kept, on a thread whose faults have been counted.
fn guest_with_a_kept_page() -> Option<Guest> {
    let pagemap = Pagemap::open().ok().filter(Pagemap::counts_faults);
    if pagemap.is_none() {
        println!("skipped: this kernel does not tell what is needed");
    }
    let mut guest = Guest::new(Some(&Arc::new(pagemap?)));
    for _ in 0..3 {
        guest.write(3, 1);
        guest.restore();
    }
    Some(guest)
}

#[test]
fn without_a_fault_the_page_tables_are_not_searched() {
    let Some(mut guest) = guest_with_a_kept_page() else {
        return;
    };
    let searches = guest.slot.searches();
    guest.slot.begin();
    guest.write(3, 0xff);
    guest.restore();
    assert_eq!(
        guest.slot.searches(),
        searches,
        "only the kept page was written"
    );
    assert!(guest.is_restored());
    guest.slot.begin();
    guest.write(9, 0xff);
    guest.restore();
    assert_eq!(
        guest.slot.searches(),
        searches + 1,
        "another page met a fault"
    );
    assert!(guest.is_restored());
}

/// The faults of one thread say nothing about what another one wrote.
#[test]
fn a_guest_that_changed_threads_is_searched_for() {
    let Some(mut guest) = guest_with_a_kept_page() else {
        return;
    };
    guest.slot.begin();
    let mut guest = std::thread::spawn(move || {
        guest.slot.use_here();
        guest.write(9, 0xff);
        guest
    })
    .join()
    .unwrap();
    let searches = guest.slot.searches();
    guest.slot.use_here();
    guest.restore();
    assert_eq!(guest.slot.searches(), searches + 1);
    assert!(guest.is_restored());
}

#[test]
fn pages_written_often_are_kept_and_others_given_back() {
    let Some(pagemap) = Pagemap::open().ok().map(Arc::new) else {
        println!("skipped: this kernel has no PAGEMAP_SCAN");
        return;
    };
    let mut guest = Guest::new(Some(&pagemap));
    for page in 10..20 {
        guest.write(page, 1);
    }
    guest.restore();
    let kept = |guest: &Guest| {
        let mut runs = Vec::new();
        let start = guest.memory.data_ptr(&guest.store).addr();
        pagemap
            .private_pages(start..start + SIZE, &mut runs)
            .unwrap();
        runs.iter().map(|run| run.len() / PAGE).sum::<usize>()
    };
    assert_eq!(kept(&guest), 10, "a page is kept when it was written");
    for _ in 0..100 {
        guest.write(10, 1);
        guest.restore();
    }
    assert_eq!(kept(&guest), 1, "nine were given back");
    // A page that comes back again and again, though it looks unchanged, stays in the end.
    let searches = guest.slot.searches();
    for _ in 0..2000 {
        guest.slot.begin();
        guest.write(30, 30); // what is there
        guest.restore();
    }
    let searches = guest.slot.searches() - searches;
    assert!(searches < 20, "{searches} searches");
}

#[test]
fn changed_pages_are_found() {
    for pagemap in pagemaps() {
        let mut guest = Guest::new(pagemap.as_ref());
        guest.write(3, 0xff);
        guest.write(40, 0xff);
        guest.write(41, 41); // what is there already
        guest.memory.grow(&mut guest.store, 1).unwrap();
        guest.write(SIZE / PAGE + 2, 9);
        assert_eq!(guest.changed(), [3, 40, SIZE / PAGE + 2]);
    }
}

#[test]
fn copies_share_what_a_guest_grew_by() {
    const GROWN: usize = SIZE / PAGE;
    for pagemap in pagemaps() {
        let mut parent = Guest::new(pagemap.as_ref());
        parent.grow(64);
        parent.write(3, 0xff);
        for page in 0..600 {
            parent.write(GROWN + page, 1);
        }
        let before = parent.data().to_vec();
        let mut child = parent.copy(pagemap.as_ref());
        assert!(parent.data() == before && child.data() == before);
        let changed = child.changed();
        assert_eq!(changed.len(), 601, "a copy knows all that it has");
        assert_eq!(parent.changed(), changed);

        // Neither sees what the other writes; a copy of a copy has all of it.
        parent.write(GROWN + 5, 2);
        child.write(GROWN + 6, 3);
        child.write(GROWN + 700, 4);
        child.grow(1);
        child.write(GROWN + 64 * WASM_PAGE / PAGE, 5);
        let grandchild = child.copy(pagemap.as_ref());
        assert!(grandchild.data() == child.data());
        assert_eq!(grandchild.changed(), child.changed());
        assert_eq!(child.changed().len(), 603);
        assert_eq!(parent.changed(), changed);
        let at = |guest: &Guest, page: usize| guest.data()[(GROWN + page) * PAGE + 7];
        assert_eq!(
            [at(&parent, 5), at(&parent, 6), at(&parent, 700)],
            [2, 1, 0]
        );
        assert_eq!([at(&child, 5), at(&child, 6), at(&child, 700)], [1, 3, 4]);

        // A restored slot has nothing of it, and the others keep theirs.
        parent.restore();
        assert!(parent.is_restored());
        drop(parent);
        assert_eq!(at(&child, 0), 1);
    }
}

/// What is shared costs a copy no memory of its own.
#[test]
fn a_copy_of_a_large_guest_has_few_pages() {
    let Some(pagemap) = Pagemap::open().ok().map(Arc::new) else {
        println!("skipped: this kernel has no PAGEMAP_SCAN");
        return;
    };
    let mut parent = Guest::new(Some(&pagemap));
    parent.grow(64);
    for page in 0..1000 {
        parent.write(SIZE / PAGE + page, 1);
    }
    let own = |guest: &Guest| {
        let mut runs = Vec::new();
        let start = guest.memory.data_ptr(&guest.store).addr();
        let end = start + guest.data().len();
        pagemap.private_pages(start..end, &mut runs).unwrap();
        runs.iter().map(|run| run.len() / PAGE).sum::<usize>()
    };
    assert_eq!(own(&parent), 1000);
    let mut child = parent.copy(Some(&pagemap));
    assert_eq!((own(&parent), own(&child)), (0, 0));
    // Little more does not begin anew: it is copied.
    parent.write(SIZE / PAGE, 2);
    child.write(SIZE / PAGE + 1, 2);
    let second = parent.copy(Some(&pagemap));
    assert_eq!((own(&parent), own(&second)), (1, 1));
}

#[test]
fn an_image_has_whole_wasm_pages() {
    Image::new(&[0; PAGE]).expect_err("a part of one");
    Image::new(&[]).expect_err("none");
}
