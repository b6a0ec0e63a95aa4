//! Blocks of keys and values that outlive their sequences, by the tokens they were made from.
//!
//! A block's keys depend on its own tokens and on all before them, so it is named by the hash of its
//! tokens and of the name of the block before it. The first name of such a chain, the root, stands
//! for everything else that the numbers depend on, such as the adapter that the sequence runs with.
//! The weights' version is not part of it: the engine empties the cache when the weights change.
//!
//! Blocks that no sequence holds give way when memory is needed, the longest unused first, and
//! within one chain the last first: a block whose predecessor is gone would never be found.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Names a full block by the tokens in it and before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrefixHash([u8; 32]);

impl PrefixHash {
    /// Returns the root of the chains of `namespace`; blocks of different ones are never shared.
    pub(super) fn root(namespace: u64) -> Self {
        Self(*blake3::hash(&namespace.to_le_bytes()).as_bytes())
    }

    /// Returns the name of the block that holds `tokens` and follows this one.
    pub(super) fn next(self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}

/// The kept blocks.
#[derive(Debug)]
pub(super) struct PrefixBlocks<B> {
    entries: BTreeMap<PrefixHash, Entry<B>>,
    /// Counts uses, to tell which was the last.
    clock: u64,
}

#[derive(Debug)]
struct Entry<B> {
    block: Arc<B>,
    used: u64,
    /// Blocks before this one in its chain.
    depth: usize,
}

impl<B> Default for PrefixBlocks<B> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            clock: 0,
        }
    }
}

impl<B> Entry<B> {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.block) == 1
    }
}

impl<B> PrefixBlocks<B> {
    /// Returns the kept blocks at the start of `chain`, up to the first that is missing.
    pub(super) fn longest(&mut self, chain: &[PrefixHash]) -> Vec<Arc<B>> {
        self.clock += 1;
        let mut blocks = Vec::new();
        for hash in chain {
            let Some(entry) = self.entries.get_mut(hash) else {
                break;
            };
            entry.used = self.clock;
            blocks.push(Arc::clone(&entry.block));
        }
        blocks
    }

    /// Keeps a block under its name, unless there is one already.
    pub(super) fn keep(&mut self, hash: PrefixHash, depth: usize, block: &Arc<B>) {
        self.entries.entry(hash).or_insert_with(|| Entry {
            block: Arc::clone(block),
            used: self.clock,
            depth,
        });
    }

    /// Marks the blocks of a chain as used now, all at the same time.
    pub(super) fn touch(&mut self, chain: &[PrefixHash]) {
        self.clock += 1;
        for hash in chain {
            if let Some(entry) = self.entries.get_mut(hash) {
                entry.used = self.clock;
            }
        }
    }

    /// Returns how many blocks only this cache holds.
    pub(super) fn idle(&self) -> usize {
        self.entries
            .values()
            .filter(|entry| entry.is_idle())
            .count()
    }

    /// Frees up to `count` blocks that nobody else holds; returns how many it freed.
    pub(super) fn evict(&mut self, count: usize) -> usize {
        let mut idle: Vec<(u64, std::cmp::Reverse<usize>, PrefixHash)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_idle())
            .map(|(&hash, entry)| (entry.used, std::cmp::Reverse(entry.depth), hash))
            .collect();
        if count < idle.len() {
            idle.select_nth_unstable(count);
            idle.truncate(count);
        }
        for (_, _, hash) in &idle {
            self.entries.remove(hash);
        }
        idle.len()
    }

    /// Forgets all blocks.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(namespace: u64, blocks: &[&[u32]]) -> Vec<PrefixHash> {
        let mut name = PrefixHash::root(namespace);
        blocks
            .iter()
            .map(|tokens| {
                name = name.next(tokens);
                name
            })
            .collect()
    }

    #[test]
    fn a_name_depends_on_all_tokens_before_and_on_the_root() {
        let first = chain(0, &[&[1, 2], &[3, 4]]);
        assert_eq!(first, chain(0, &[&[1, 2], &[3, 4]]));
        assert_ne!(first[1], chain(0, &[&[2, 1], &[3, 4]])[1]);
        assert_ne!(first[1], chain(1, &[&[1, 2], &[3, 4]])[1]);
        assert_ne!(first[0], chain(0, &[&[1, 3]])[0]);
    }

    #[test]
    fn idle_blocks_go_the_longest_unused_first_and_the_end_of_a_chain_before_its_start() {
        let mut cache = PrefixBlocks::default();
        let (old, new) = (chain(0, &[&[1], &[2]]), chain(0, &[&[5], &[6]]));
        let held = Arc::new("held");
        for (names, first) in [(&old, &held), (&new, &Arc::new("a"))] {
            cache.keep(names[0], 0, first);
            cache.keep(names[1], 1, &Arc::new("b"));
            cache.touch(names);
        }
        assert_eq!(cache.idle(), 3);
        assert_eq!(cache.longest(&old).len(), 2, "now the new ones are older");
        assert_eq!(cache.evict(1), 1);
        assert_eq!(cache.longest(&new).len(), 1);
        assert_eq!(cache.evict(10), 2, "what somebody holds stays");
        assert_eq!(cache.longest(&old).as_slice(), [held]);
    }

    #[test]
    fn a_missing_block_ends_the_prefix() {
        let mut cache = PrefixBlocks::default();
        let names = chain(0, &[&[1], &[2], &[3]]);
        cache.keep(names[0], 0, &Arc::new(0));
        cache.keep(names[2], 2, &Arc::new(2));
        assert_eq!(cache.longest(&names).len(), 1);
        cache.clear();
        assert!(cache.longest(&names).is_empty());
    }
}
