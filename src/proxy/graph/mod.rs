//! The calls of a session, linked by their tokens, and the training rows that come of it.
//!
//! The parent of a call is the one whose prompt and completion are the **longest exact prefix** of its
//! prompt. A call that extends none is a root: the agent's first one, a sub-agent's, one after the
//! history was rewritten. Each path from a root to a leaf is one row. What an agent does besides its
//! main line (retries, parallel calls, titles) is so a row of its own and never mixed into another.
//!
//! A call without exact ids is part of no row: it hangs on the call that its messages continue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;

use super::record::{Call, CallTokens};
use crate::trajectory::TokenTrace;

#[cfg(test)]
mod tests;

/// What a row is of, by the shape of the graph alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The agent's work. There may be several: sub-agents, and what follows a rewritten history.
    Agent,
    /// No call of it has tools, while others of the session do: a title, a summary.
    Auxiliary,
    /// It ends in a call that was asked again, with the same prompt, and the other answer was used.
    Discarded,
}

/// One path from a root to a leaf, as tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The calls, the root first.
    pub calls: Vec<usize>,
    /// Their tokens: what the model was fed and, with mask 1, what it sampled.
    pub trace: TokenTrace,
    /// What it is of.
    pub role: Role,
}

impl Row {
    /// Returns whether there is something to learn from it.
    #[must_use]
    pub fn is_trainable(&self) -> bool {
        self.role == Role::Agent && self.trace.sampled_len() > 0
    }
}

/// The shape of a graph, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GraphStats {
    /// Calls.
    pub n_turns: usize,
    /// Calls that extend no other.
    pub n_roots: usize,
    /// Calls that no other extends.
    pub n_leaves: usize,
    /// Calls that several others extend.
    pub n_forks: usize,
    /// Calls that were asked again and not used.
    pub n_discarded: usize,
}

#[derive(Debug, Clone)]
struct Node {
    call: Arc<Call>,
    parent: Option<usize>,
    children: Vec<usize>,
}

/// All calls of one attempt of a session. A copy shares them.
#[derive(Debug, Clone, Default)]
pub struct CallGraph {
    nodes: Vec<Node>,
    /// The latest call that ends in the tokens of a hash.
    ends: BTreeMap<[u8; 32], usize>,
    /// The lengths of all ends.
    lengths: BTreeSet<usize>,
}

impl CallGraph {
    /// Adds a call; `continues` is the one whose conversation it goes on with, which counts only
    /// where there are no ids. Returns its place.
    pub fn push(&mut self, call: Call, continues: Option<usize>) -> usize {
        let place = self.nodes.len();
        let parent = match &call.tokens {
            Some(tokens) => self.longest_prefix(tokens.prompt()),
            None => continues.filter(|&parent| parent < place),
        };
        if let Some(tokens) = &call.tokens
            // Whoever samples nothing has no end that another could extend: it would be its prompt's.
            && !tokens.completion().is_empty()
        {
            self.ends.insert(hash_of(tokens), place);
            self.lengths.insert(tokens.len());
        }
        if let Some(parent) = parent {
            self.nodes[parent].children.push(place);
        }
        self.nodes.push(Node {
            call: Arc::new(call),
            parent,
            children: Vec::new(),
        });
        place
    }

    /// Returns the call whose tokens are the longest exact prefix of `prompt`. The prompt is read
    /// once, whatever the number of calls.
    fn longest_prefix(&self, prompt: &[u32]) -> Option<usize> {
        let mut hasher = blake3::Hasher::new();
        let (mut hashed, mut found) = (0, None);
        for &length in self.lengths.range(..=prompt.len()) {
            update(&mut hasher, &prompt[hashed..length]);
            hashed = length;
            if let Some(&place) = self.ends.get(hasher.finalize().as_bytes()) {
                found = Some(place);
            }
        }
        found
    }

    /// Returns the calls in the order in which they were answered.
    pub fn calls(&self) -> impl ExactSizeIterator<Item = &Call> {
        self.nodes.iter().map(|node| &*node.call)
    }

    /// Returns the call at a place.
    #[must_use]
    pub fn call(&self, place: usize) -> Option<&Call> {
        self.nodes.get(place).map(|node| &*node.call)
    }

    /// Returns the call at a place, to be kept.
    pub(super) fn shared(&self, place: usize) -> Option<Arc<Call>> {
        self.nodes.get(place).map(|node| Arc::clone(&node.call))
    }

    /// Returns the call that the one at `place` extends.
    #[must_use]
    pub fn parent(&self, place: usize) -> Option<usize> {
        self.nodes.get(place)?.parent
    }

    /// Returns the root of the call at `place`.
    #[must_use]
    pub fn root(&self, mut place: usize) -> usize {
        while let Some(parent) = self.parent(place) {
            place = parent;
        }
        place
    }

    /// Returns the shape in numbers.
    #[must_use]
    pub fn stats(&self) -> GraphStats {
        let count = |is: &dyn Fn(&Node) -> bool| self.nodes.iter().filter(|node| is(node)).count();
        GraphStats {
            n_turns: self.nodes.len(),
            n_roots: count(&|node| node.parent.is_none()),
            n_leaves: count(&|node| node.children.is_empty()),
            n_forks: count(&|node| node.children.len() > 1),
            n_discarded: self.discarded().len(),
        }
    }

    /// Returns the calls that were asked again with the same prompt while the answer of another was
    /// gone on with. Where none was, nobody can tell which one counts, and all do.
    #[must_use]
    pub fn discarded(&self) -> BTreeSet<usize> {
        let mut asked: BTreeMap<&[u32], Vec<usize>> = BTreeMap::new();
        for (place, node) in self.nodes.iter().enumerate() {
            if let Some(tokens) = &node.call.tokens {
                asked.entry(tokens.prompt()).or_default().push(place);
            }
        }
        let is_used = |place: &usize| !self.nodes[*place].children.is_empty();
        asked
            .into_values()
            .filter(|places| places.iter().any(is_used))
            .flatten()
            .filter(|place| !is_used(place))
            .collect()
    }

    /// Returns one row for each path from a root to a leaf, in the order of the leaves.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let discarded = self.discarded();
        let has_tools = |place: &usize| !self.nodes[*place].call.tools.is_empty();
        let tools_tell = (0..self.nodes.len()).any(|place| has_tools(&place));
        let mut rows = Vec::new();
        for (place, node) in self.nodes.iter().enumerate() {
            let has_ids = |place: &usize| self.nodes[*place].call.tokens.is_some();
            if !has_ids(&place) || node.children.iter().any(has_ids) {
                continue;
            }
            let mut calls = vec![place];
            while let Some(parent) = self.parent(calls[calls.len() - 1]) {
                calls.push(parent);
            }
            calls.reverse();
            let role = if discarded.contains(&place) {
                Role::Discarded
            } else if tools_tell && !calls.iter().any(has_tools) {
                Role::Auxiliary
            } else {
                Role::Agent
            };
            let trace = self.trace(&calls);
            rows.push(Row { calls, trace, role });
        }
        rows
    }

    /// Lays the tokens of a path end to end.
    fn trace(&self, path: &[usize]) -> TokenTrace {
        let mut trace = TokenTrace::new();
        for place in path {
            let Some(tokens) = &self.nodes[*place].call.tokens else {
                continue;
            };
            let new = &tokens.prompt()[trace.len()..];
            if trace.is_empty() {
                let first = trace.push_prompt(new);
                first.expect("an empty trace takes a prompt");
            } else {
                trace.push_observation(new);
            }
            let mut at = 0;
            for run in tokens.loss_mask().chunk_by(|left, right| left == right) {
                let end = at + run.len();
                let ids = &tokens.completion()[at..end];
                if run[0] == 1 {
                    let pushed = trace.push_sampled(ids, &tokens.logprobs()[at..end]);
                    pushed.expect("`CallTokens` holds log-probabilities");
                } else {
                    trace.push_observation(ids);
                }
                at = end;
            }
        }
        trace
    }
}

fn hash_of(tokens: &CallTokens) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    update(&mut hasher, tokens.prompt());
    update(&mut hasher, tokens.completion());
    *hasher.finalize().as_bytes()
}

fn update(hasher: &mut blake3::Hasher, ids: &[u32]) {
    let mut bytes = [0; 4 * 256];
    for ids in ids.chunks(256) {
        for (to, id) in bytes.chunks_exact_mut(4).zip(ids) {
            to.copy_from_slice(&id.to_le_bytes());
        }
        hasher.update(&bytes[..4 * ids.len()]);
    }
}
