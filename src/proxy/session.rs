//! Sessions: what was captured under one key, and who may still add to it.
//!
//! A session goes through attempts. `reset` starts the next one: the calls of the one before are
//! dropped, and those of it that are still under way are refused when they come back, so that a retry
//! never mixes with what it retries.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::ProxyError;
use super::graph::CallGraph;
use super::history::{Continued, History};
use super::record::{Call, value_bytes};
use super::recorder::Recorder;
use crate::http::{unix_seconds, uuid4};

/// The longest id that a client may choose.
const MAX_ID: usize = 128;

/// What bounds the bytes of one session.
pub(super) const SESSION_BYTES: &str = "--max-session-bytes";

/// First parts of paths that are no session's.
const RESERVED: [&str; 4] = ["v1", "sessions", "health", "metrics"];

/// What a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Purpose {
    /// Calls are sampled as the agent asks; those that a trainer cannot score again are context.
    #[default]
    Auto,
    /// Sampling is pinned to the model's own distribution, so that every call can be learned from.
    Train,
    /// Nothing is to be learned from.
    Eval,
}

impl Purpose {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }
}

/// How the calls of a session are answered.
#[derive(Debug, Clone, Default)]
pub(super) struct SessionOptions {
    pub(super) purpose: Purpose,
    /// Sampling parameters that stand for those of every request.
    pub(super) sampling: Map<String, Value>,
    /// Tokens of an answer at the most, and where a request says nothing of it.
    pub(super) max_new_tokens: Option<usize>,
    /// Whether the model thinks where a request does not say.
    pub(super) enable_thinking: Option<bool>,
    /// Calls of an attempt; the next one is answered with a stop. 0 is no limit.
    pub(super) max_model_calls: u64,
    /// What the random numbers of its calls are made of; without it no two sessions have the same.
    pub(super) seed: Option<u64>,
    /// Whatever its maker wants to find again.
    pub(super) metadata: Map<String, Value>,
}

/// How much sessions may hold.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) session_bytes: u64,
    pub(super) total_bytes: u64,
    used: AtomicU64,
}

impl Budget {
    pub(super) fn new(session_bytes: u64, total_bytes: u64) -> Self {
        Self {
            session_bytes,
            total_bytes,
            used: AtomicU64::new(0),
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// What was captured under one key.
///
/// Its locks are taken in the order of the fields: what is kept takes a while to add to, who may come in is
/// told at once.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: String,
    pub(super) options: SessionOptions,
    pub(super) created: u64,
    budget: Arc<Budget>,
    recorder: Option<Recorder>,
    state: Mutex<State>,
    gate: Mutex<Gate>,
    uses: Uses,
}

/// When a session was used.
#[derive(Debug)]
struct Uses {
    opened: Instant,
    /// The last call, in nanoseconds since then.
    called: AtomicU64,
    /// The last call or question.
    seen: AtomicU64,
    /// Calls that are being answered.
    under_way: AtomicUsize,
}

impl Uses {
    fn new() -> Self {
        Self {
            opened: Instant::now(),
            called: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
        }
    }

    fn note(&self, what: &AtomicU64) {
        let now = u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
        what.fetch_max(now, Ordering::Relaxed);
    }

    fn since(&self, what: &AtomicU64) -> Duration {
        let at = Duration::from_nanos(what.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(at)
    }
}

/// Who may come in, and what became of those who did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gate {
    pub(super) attempt: u32,
    pub(super) is_complete: bool,
    /// Calls of this attempt that were let in and count.
    asked: u64,
    /// Calls that were answered with a stop.
    pub(super) budget_stops: u64,
    pub(super) upstream_errors: u64,
    /// Calls that failed by no fault of the agent's, the upstream's errors among them.
    pub(super) faults: u64,
    /// Calls that were refused for what they asked.
    pub(super) refusals: u64,
}

impl Gate {
    fn new(attempt: u32) -> Self {
        Self {
            attempt,
            is_complete: false,
            asked: 0,
            budget_stops: 0,
            upstream_errors: 0,
            faults: 0,
            refusals: 0,
        }
    }
}

/// What an attempt holds.
#[derive(Debug, Default)]
struct State {
    graph: CallGraph,
    history: History,
    /// Messages and tools that calls share, by their hash.
    texts: HashMap<[u8; 32], Arc<Value>>,
    tools: HashMap<[u8; 32], Arc<[Value]>>,
    /// How often each prompt was asked for, by its hash.
    prompts: HashMap<[u8; 32], u64>,
    bytes: u64,
}

impl State {
    /// Returns the one copy of a text that a session keeps; its bytes are counted once.
    fn text(&mut self, value: Value, bytes: &mut u64) -> Arc<Value> {
        let text = value.to_string();
        let hash = *blake3::hash(text.as_bytes()).as_bytes();
        let shared = self.texts.entry(hash).or_insert_with(|| {
            *bytes += value_bytes(&text);
            Arc::new(value)
        });
        Arc::clone(shared)
    }

    fn tools(&mut self, tools: Vec<Value>, bytes: &mut u64) -> Arc<[Value]> {
        let text = Value::from(tools.as_slice()).to_string();
        let hash = *blake3::hash(text.as_bytes()).as_bytes();
        let shared = self.tools.entry(hash).or_insert_with(|| {
            *bytes += value_bytes(&text);
            Arc::from(tools)
        });
        Arc::clone(shared)
    }
}

/// What a session holds at a time, to be read without holding up its calls.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) gate: Gate,
    pub(super) graph: CallGraph,
}

/// Leave to ask the model once.
///
/// A call that ends without an answer, and not by the agent's doing, costs it none of its calls: dropped
/// without [`Entry::spend`], it is given back.
#[derive(Debug)]
pub(super) struct Entry {
    session: Arc<Session>,
    pub(super) attempt: u32,
    /// Whether the session's calls are used up, and the agent is to be told to stop.
    pub(super) is_over_budget: bool,
    is_spent: bool,
}

impl Entry {
    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Makes it count: the agent has something of the answer.
    pub(super) fn spend(&mut self) {
        self.is_spent = true;
    }

    /// Notes how the call failed; it counts where that is the agent's doing.
    pub(super) fn fail(&mut self, error: &ProxyError) {
        self.session.count_failure(Some(self.attempt), error);
        self.is_spent = !error.is_fault();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.session.uses.under_way.fetch_sub(1, Ordering::Relaxed);
        self.session.touch();
        let mut gate = self.session.gate();
        if !self.is_spent && !self.is_over_budget && gate.attempt == self.attempt {
            gate.asked = gate.asked.saturating_sub(1);
        }
    }
}

/// A call as it comes back, before it shares its texts with others.
#[derive(Debug)]
pub(super) struct Captured {
    /// Without its texts.
    pub(super) call: Call,
    pub(super) messages: Vec<Value>,
    pub(super) tools: Vec<Value>,
    /// All else that a prompt is rendered from.
    pub(super) setting: Value,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that somebody asked for the session.
    pub(super) fn touch(&self) {
        self.uses.note(&self.uses.seen);
    }

    /// Returns the time since the last call came or ended.
    pub(super) fn idle(&self) -> Duration {
        self.uses.since(&self.uses.called)
    }

    /// Returns the time since anybody asked for it; none while a call is under way.
    fn unused(&self) -> Option<Duration> {
        let is_used = self.uses.under_way.load(Ordering::Relaxed) > 0;
        (!is_used).then(|| self.uses.since(&self.uses.seen))
    }

    /// Returns what it holds now; it waits for a call that is being added.
    pub(super) fn snapshot(&self) -> Snapshot {
        let state = self.lock();
        let gate = *self.gate();
        let graph = state.graph.clone();
        Snapshot { gate, graph }
    }

    /// Takes what it holds, and lets no more calls in.
    pub(super) fn take(&self) -> Snapshot {
        let mut state = self.lock();
        let mut gate = self.gate();
        gate.is_complete = true;
        let graph = std::mem::take(&mut state.graph);
        Snapshot { gate: *gate, graph }
    }

    /// Lets a call in; `attempt` is the one that it says it is of.
    pub(super) fn enter(self: &Arc<Self>, attempt: Option<u32>) -> Result<Entry, ProxyError> {
        self.touch();
        self.uses.note(&self.uses.called);
        let mut gate = self.gate();
        let attempt = attempt.unwrap_or(gate.attempt);
        self.check(&gate, attempt)?;
        let limit = self.options.max_model_calls;
        let is_over_budget = limit > 0 && gate.asked >= limit;
        if is_over_budget {
            gate.budget_stops += 1;
        } else {
            gate.asked += 1;
        }
        drop(gate);
        self.uses.under_way.fetch_add(1, Ordering::Relaxed);
        Ok(Entry {
            session: Arc::clone(self),
            attempt,
            is_over_budget,
            is_spent: false,
        })
    }

    /// Notes how a call failed, of `attempt` or of the one that is under way.
    pub(super) fn count_failure(&self, attempt: Option<u32>, error: &ProxyError) {
        let mut gate = self.gate();
        if attempt.is_none_or(|attempt| attempt == gate.attempt) {
            gate.upstream_errors += u64::from(error.is_upstreams());
            gate.faults += u64::from(error.is_fault());
            gate.refusals += u64::from(!error.is_fault());
        }
    }

    fn check(&self, gate: &Gate, attempt: u32) -> Result<(), ProxyError> {
        if gate.attempt != attempt {
            return Err(ProxyError::Outdated {
                session: self.id.clone(),
                attempt,
                current: gate.attempt,
            });
        }
        if gate.is_complete {
            return Err(ProxyError::Complete {
                session: self.id.clone(),
            });
        }
        Ok(())
    }

    /// Returns the earlier call that a conversation goes on from, and how.
    pub(super) fn find(
        &self,
        setting: &Value,
        messages: &[Value],
    ) -> Option<(Arc<Call>, Continued)> {
        let state = self.lock();
        let found = (state.history).find(setting, messages, |place| state.graph.call(place))?;
        Some((state.graph.shared(found.call)?, found))
    }

    /// Returns the seed of a call with this prompt, if the session has one: another seed for each prompt,
    /// and for each time that it is asked, in whatever order the calls of an agent come.
    pub(super) fn call_seed(&self, prompt: &[u32]) -> Option<i64> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.options.seed?.to_le_bytes());
        for id in prompt {
            hasher.update(&id.to_le_bytes());
        }
        let mut state = self.lock();
        let asked = (state.prompts)
            .entry(*hasher.finalize().as_bytes())
            .or_default();
        hasher.update(&asked.to_le_bytes());
        *asked += 1;
        let mut seed = [0; 8];
        hasher.finalize_xof().fill(&mut seed);
        Some(i64::from_le_bytes(seed))
    }

    /// Keeps a call. Whoever comes back to an attempt that is over is refused.
    pub(super) fn record(&self, captured: Captured) -> Result<(), ProxyError> {
        let Captured {
            mut call,
            messages,
            tools,
            setting,
        } = captured;
        self.uses.note(&self.uses.called);
        let mut state = self.lock();
        self.check(&self.gate(), call.attempt)?;
        // Texts of what is refused are kept, too: once is enough.
        self.check_room(state.bytes, self.budget.used())?;
        let mut bytes = 0;
        call.messages = messages
            .into_iter()
            .map(|message| state.text(message, &mut bytes))
            .collect();
        call.tools = state.tools(tools, &mut bytes);
        bytes += call.bytes();
        // What it holds is counted even where it is refused: its texts stay.
        state.bytes += bytes;
        let total = self.budget.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.check_room(state.bytes, total)?;
        if let Some(recorder) = &self.recorder {
            recorder.write(&call.line(&self.id))?;
        }
        let continues = match &call.tokens {
            Some(_) => None,
            None => {
                let sent: Vec<Value> = call.messages.iter().map(|text| (**text).clone()).collect();
                let found = (state.history).find(&setting, &sent, |at| state.graph.call(at));
                found.map(|found| found.call)
            }
        };
        let state = &mut *state;
        let place = state.graph.push(call, continues);
        if let Some(call) = state.graph.call(place) {
            state.history.insert(&setting, call, place);
        }
        Ok(())
    }

    /// Refuses what the session or all of them have no room for.
    fn check_room(&self, bytes: u64, total: u64) -> Result<(), ProxyError> {
        if bytes > self.budget.session_bytes {
            return Err(ProxyError::Full {
                what: "the session's calls take more than its bytes, which are",
                limit: self.budget.session_bytes,
                option: SESSION_BYTES,
            });
        }
        if total > self.budget.total_bytes {
            return Err(ProxyError::Full {
                what: "the calls of all sessions take more than their bytes, which are",
                limit: self.budget.total_bytes,
                option: "--max-total-bytes",
            });
        }
        Ok(())
    }

    /// Starts the next attempt; returns its number.
    pub(super) fn reset(&self) -> Result<u32, ProxyError> {
        let mut state = self.lock();
        let Gate {
            attempt,
            is_complete,
            ..
        } = *self.gate();
        if is_complete {
            return Err(ProxyError::Complete {
                session: self.id.clone(),
            });
        }
        let attempt = attempt + 1;
        self.note(&json!({"kind": "reset", "session_id": self.id, "attempt": attempt}))?;
        self.budget.used.fetch_sub(state.bytes, Ordering::Relaxed);
        *state = State::default();
        *self.gate() = Gate::new(attempt);
        Ok(attempt)
    }

    /// Takes no more calls; what comes back late is refused.
    pub(super) fn complete(&self, told: &Value) -> Result<(), ProxyError> {
        let _no_call_is_added = self.lock();
        let Gate {
            attempt,
            is_complete,
            ..
        } = *self.gate();
        if !is_complete {
            let line = json!({
                "kind": "completed", "session_id": self.id, "attempt": attempt, "told": told,
            });
            self.note(&line)?;
            self.gate().is_complete = true;
        }
        Ok(())
    }

    /// Takes no more calls of a session that is deleted.
    pub(super) fn delete(&self) {
        // A line that cannot be written keeps nobody.
        let _ = self.complete(&json!("deleted"));
        self.gate().is_complete = true;
    }

    fn note(&self, line: &Value) -> Result<(), ProxyError> {
        match &self.recorder {
            Some(recorder) => recorder.write(line),
            None => Ok(()),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let bytes = self.lock().bytes;
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// All sessions, by their ids, which are the keys that agents send.
#[derive(Debug)]
pub(super) struct Sessions {
    max_sessions: usize,
    timeout: Duration,
    pub(super) budget: Arc<Budget>,
    folder: Option<std::path::PathBuf>,
    sessions: Mutex<BTreeMap<String, Arc<Session>>>,
}

impl Sessions {
    pub(super) fn new(
        max_sessions: usize,
        timeout: Duration,
        budget: Budget,
        folder: Option<std::path::PathBuf>,
    ) -> Self {
        Self {
            max_sessions,
            timeout,
            budget: Arc::new(budget),
            folder,
            sessions: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session, under a new id if none is given. It may wait for the disk. Where there is no more
    /// room, the session goes that nobody has used for the longest, if for the timeout.
    pub(super) fn create(
        &self,
        id: Option<String>,
        options: SessionOptions,
    ) -> Result<Arc<Session>, ProxyError> {
        let id = id.unwrap_or_else(uuid4);
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if id.is_empty()
            || id.len() > MAX_ID
            || id.starts_with('.')
            || !id.chars().all(is_name)
            || RESERVED.contains(&id.as_str())
        {
            return Err(ProxyError::invalid(
                "session_id",
                format!(
                    "a session's id has 1 to {MAX_ID} letters, digits, `.`, `_` or `-`, begins with \
                     none of `.`, and is none of {RESERVED:?}"
                ),
            ));
        }
        let session = Arc::new(Session {
            id: id.clone(),
            options,
            created: unix_seconds(),
            budget: Arc::clone(&self.budget),
            recorder: (self.folder.as_deref()).map(|folder| Recorder::new(folder, &id)),
            state: Mutex::default(),
            gate: Mutex::new(Gate::new(1)),
            uses: Uses::new(),
        });
        // Held before anybody else finds the session, so that its own line is the first.
        let first = session.recorder.as_ref().map(Recorder::lock);
        let mut sessions = self.lock();
        if sessions.contains_key(&id) {
            return Err(ProxyError::Exists { session: id });
        }
        let dropped = match sessions.len() < self.max_sessions {
            true => None,
            false => match self.longest_unused(&sessions) {
                Some(unused) => sessions.remove(&unused),
                None => {
                    return Err(ProxyError::Full {
                        what: "there are as many sessions as are kept, which are",
                        limit: self.max_sessions as u64,
                        option: "--max-sessions",
                    });
                }
            },
        };
        sessions.insert(id.clone(), Arc::clone(&session));
        drop(sessions);
        drop(dropped); // it may hold much
        let written = first.map_or(Ok(()), |mut first| {
            let line = json!({
                "kind": "session", "session_id": id, "attempt": 1, "created": session.created,
                "purpose": session.options.purpose.name(), "sampling": session.options.sampling,
                "metadata": session.options.metadata,
            });
            first.write(&line)
        });
        if let Err(error) = written {
            session.delete();
            let mut sessions = self.lock();
            if sessions
                .get(&id)
                .is_some_and(|kept| Arc::ptr_eq(kept, &session))
            {
                sessions.remove(&id);
            }
            return Err(error);
        }
        Ok(session)
    }

    /// Returns the session that nobody has used for the longest, if for the timeout.
    fn longest_unused(&self, sessions: &BTreeMap<String, Arc<Session>>) -> Option<String> {
        let unused = sessions
            .iter()
            .filter_map(|(id, session)| Some((session.unused()?, id)));
        let (unused, id) = unused.max()?;
        (unused >= self.timeout).then(|| id.clone())
    }

    /// Returns the session of an id, which counts as used: it does not make room for others meanwhile.
    pub(super) fn get(&self, id: &str) -> Option<Arc<Session>> {
        let sessions = self.lock();
        let session = sessions.get(id)?;
        session.touch();
        Some(Arc::clone(session))
    }

    pub(super) fn remove(&self, id: &str) -> Option<Arc<Session>> {
        self.lock().remove(id)
    }

    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.lock().values().cloned().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Waits that no machine is too slow for.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn sessions(max_sessions: usize, folder: Option<&std::path::Path>) -> Arc<Sessions> {
        let budget = Budget::new(u64::MAX, u64::MAX);
        let folder = folder.map(std::path::Path::to_owned);
        Arc::new(Sessions::new(max_sessions, Duration::ZERO, budget, folder))
    }

    fn open(sessions: &Sessions, id: &str) -> Result<Arc<Session>, ProxyError> {
        sessions.create(Some(id.to_owned()), SessionOptions::default())
    }

    /// Runs `work` beside; fails where it does not end.
    fn ends(work: impl FnOnce() + Send + 'static) {
        let (sender, ended) = mpsc::channel();
        std::thread::spawn(move || {
            work();
            sender.send(()).unwrap();
        });
        ended.recv_timeout(PATIENCE).expect("nothing waits");
    }

    #[test]
    fn what_is_read_or_added_holds_up_no_call_and_no_other_session() {
        let sessions = sessions(8, None);
        let busy = open(&sessions, "busy").unwrap();
        let _state = busy.lock();
        let (others, entering) = (Arc::clone(&sessions), Arc::clone(&busy));
        ends(move || {
            let mut entry = entering.enter(None).unwrap();
            entry.fail(&ProxyError::upstream("of the test"));
            assert!(entering.idle() < PATIENCE);
            drop(entry);
            open(&others, "other").unwrap();
        });
    }

    #[test]
    fn a_file_that_is_slow_holds_up_its_own_session_alone() {
        let folder = tempfile::tempdir().unwrap();
        let sessions = sessions(8, Some(folder.path()));
        let slow = open(&sessions, "slow").unwrap();
        let _writes = slow.recorder.as_ref().unwrap().lock();
        let others = Arc::clone(&sessions);
        ends(move || {
            assert!(others.get("slow").is_some());
            open(&others, "other").unwrap();
        });
        let lines = fs_err::read_to_string(folder.path().join("other.jsonl")).unwrap();
        assert!(lines.starts_with(r#"{"kind":"session","session_id":"other""#));
    }

    #[test]
    fn a_session_whose_file_cannot_be_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs_err::write(&file, "").unwrap();
        let sessions = sessions(1, Some(&file));
        for _ in 0..2 {
            let error = open(&sessions, "s").unwrap_err();
            assert!(matches!(error, ProxyError::Recording { .. }), "{error}");
        }
        assert_eq!(sessions.len(), 0);
    }

    #[test]
    fn only_who_is_idle_longest_makes_room_and_none_that_is_called() {
        let sessions = sessions(2, None);
        let kept = |ids: [&str; 2]| ids.map(|id| sessions.lock().contains_key(id));
        open(&sessions, "a").unwrap();
        let b = open(&sessions, "b").unwrap();
        assert_eq!(kept(["a", "b"]), [true, true], "there is room");
        // Asked for since.
        sessions.get("a").unwrap();
        open(&sessions, "c").unwrap();
        assert_eq!(kept(["a", "b"]), [true, false]);
        drop(b);
        let entry = sessions.get("a").unwrap().enter(None).unwrap();
        open(&sessions, "d").unwrap();
        assert_eq!(kept(["a", "c"]), [true, false]);
        let other = sessions.get("d").unwrap().enter(None).unwrap();
        let full = open(&sessions, "e").unwrap_err();
        assert!(matches!(full, ProxyError::Full { .. }), "{full}");
        drop((entry, other));
        open(&sessions, "e").unwrap();
    }

    #[test]
    fn what_is_refused_is_not_kept_over_and_over() {
        let budget = Budget::new(12_000, u64::MAX);
        let sessions = Sessions::new(1, Duration::ZERO, budget, None);
        let session = open(&sessions, "s").unwrap();
        let record = |number: usize| {
            let text = format!("{number}{}", "x".repeat(8000));
            session.record(Captured {
                call: crate::proxy::record::test_call(),
                messages: vec![json!({"role": "user", "content": text})],
                tools: Vec::new(),
                setting: Value::Null,
            })
        };
        record(0).unwrap();
        for number in 1..20 {
            let full = record(number).unwrap_err();
            assert!(matches!(full, ProxyError::Full { .. }), "{full}");
        }
        assert_eq!(session.lock().texts.len(), 2);
        assert!(sessions.budget.used() < 30_000);
    }
}
