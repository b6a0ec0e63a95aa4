//! Sessions: what was captured under one key, and who may still add to it.
//!
//! A session goes through attempts. `reset` starts the next one: the calls of the one before are
//! dropped, and those of it that are still under way are refused when they come back, so that a retry
//! never mixes with what it retries.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::ProxyError;
use super::graph::CallGraph;
use super::history::{Continued, History};
use super::record::Call;
use super::recorder::Recorder;
use crate::http::{unix_seconds, uuid4};

/// The longest id that a client may choose.
const MAX_ID: usize = 128;

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
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: String,
    pub(super) options: SessionOptions,
    pub(super) created: u64,
    budget: Arc<Budget>,
    recorder: Option<Recorder>,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) attempt: u32,
    pub(super) is_complete: bool,
    pub(super) graph: CallGraph,
    history: History,
    /// Messages and tools that calls share, by their hash.
    texts: HashMap<[u8; 32], Arc<Value>>,
    tools: HashMap<[u8; 32], Arc<[Value]>>,
    /// How often each prompt was asked for, by its hash.
    prompts: HashMap<[u8; 32], u64>,
    bytes: u64,
    /// Calls of this attempt that were let in.
    asked: u64,
    /// Calls that were answered with a stop.
    pub(super) budget_stops: u64,
    pub(super) upstream_errors: u64,
    last_used: Instant,
}

impl State {
    fn new(attempt: u32) -> Self {
        Self {
            attempt,
            is_complete: false,
            graph: CallGraph::default(),
            history: History::default(),
            texts: HashMap::new(),
            tools: HashMap::new(),
            prompts: HashMap::new(),
            bytes: 0,
            asked: 0,
            budget_stops: 0,
            upstream_errors: 0,
            last_used: Instant::now(),
        }
    }

    pub(super) fn idle(&self) -> Duration {
        self.last_used.elapsed()
    }

    /// Returns the one copy of a text that a session keeps; its bytes are counted once.
    fn text(&mut self, value: Value, bytes: &mut u64) -> Arc<Value> {
        let text = value.to_string();
        let hash = *blake3::hash(text.as_bytes()).as_bytes();
        let shared = self.texts.entry(hash).or_insert_with(|| {
            *bytes += 2 * text.len() as u64;
            Arc::new(value)
        });
        Arc::clone(shared)
    }

    fn tools(&mut self, tools: Vec<Value>, bytes: &mut u64) -> Arc<[Value]> {
        let text = Value::from(tools.as_slice()).to_string();
        let hash = *blake3::hash(text.as_bytes()).as_bytes();
        let shared = self.tools.entry(hash).or_insert_with(|| {
            *bytes += 2 * text.len() as u64;
            Arc::from(tools)
        });
        Arc::clone(shared)
    }
}

/// Leave to ask the model once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) attempt: u32,
    /// Whether the session's calls are used up, and the agent is to be told to stop.
    pub(super) is_over_budget: bool,
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
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a call in; `attempt` is the one that it says it is of.
    pub(super) fn enter(&self, attempt: Option<u32>) -> Result<Entry, ProxyError> {
        let mut state = self.lock();
        state.last_used = Instant::now();
        let attempt = attempt.unwrap_or(state.attempt);
        self.check(&state, attempt)?;
        let limit = self.options.max_model_calls;
        let is_over_budget = limit > 0 && state.asked >= limit;
        if is_over_budget {
            state.budget_stops += 1;
        } else {
            state.asked += 1;
        }
        Ok(Entry {
            attempt,
            is_over_budget,
        })
    }

    fn check(&self, state: &State, attempt: u32) -> Result<(), ProxyError> {
        if state.attempt != attempt {
            return Err(ProxyError::Outdated {
                session: self.id.clone(),
                attempt,
                current: state.attempt,
            });
        }
        if state.is_complete {
            return Err(ProxyError::Complete {
                session: self.id.clone(),
            });
        }
        Ok(())
    }

    /// Returns the earlier call that a conversation goes on from, and how.
    pub(super) fn find(&self, setting: &Value, messages: &[Value]) -> Option<(Call, Continued)> {
        let state = self.lock();
        let found = (state.history).find(setting, messages, |place| state.graph.call(place))?;
        Some((state.graph.call(found.call)?.clone(), found))
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
        let mut state = self.lock();
        state.last_used = Instant::now();
        self.check(&state, call.attempt)?;
        let mut bytes = 0;
        call.messages = messages
            .into_iter()
            .map(|message| state.text(message, &mut bytes))
            .collect();
        call.tools = state.tools(tools, &mut bytes);
        bytes += (call.bytes() + call.answer.to_string().len()) as u64;
        // What it holds is counted even where it is refused: its texts stay.
        state.bytes += bytes;
        let total = self.budget.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if state.bytes > self.budget.session_bytes {
            return Err(ProxyError::Full {
                what: "the session's calls take more than its bytes, which are",
                limit: self.budget.session_bytes,
                option: "--max-session-bytes",
            });
        }
        if total > self.budget.total_bytes {
            return Err(ProxyError::Full {
                what: "the calls of all sessions take more than their bytes, which are",
                limit: self.budget.total_bytes,
                option: "--max-total-bytes",
            });
        }
        if let Some(recorder) = &self.recorder {
            recorder.write(&call.to_json(&self.id))?;
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

    /// Starts the next attempt; returns its number.
    pub(super) fn reset(&self) -> Result<u32, ProxyError> {
        let mut state = self.lock();
        if state.is_complete {
            return Err(ProxyError::Complete {
                session: self.id.clone(),
            });
        }
        let attempt = state.attempt + 1;
        self.note(&json!({"kind": "reset", "session_id": self.id, "attempt": attempt}))?;
        self.budget.used.fetch_sub(state.bytes, Ordering::Relaxed);
        *state = State::new(attempt);
        Ok(attempt)
    }

    /// Takes no more calls; what comes back late is refused.
    pub(super) fn complete(&self, told: &Value) -> Result<(), ProxyError> {
        let mut state = self.lock();
        if !state.is_complete {
            let line = json!({
                "kind": "completed", "session_id": self.id, "attempt": state.attempt, "told": told,
            });
            self.note(&line)?;
            state.is_complete = true;
        }
        Ok(())
    }

    pub(super) fn note(&self, line: &Value) -> Result<(), ProxyError> {
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

    /// Opens a session, under a new id if none is given. Sessions that nobody has used for the
    /// timeout make room.
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
        let mut sessions = self.lock();
        if sessions.contains_key(&id) {
            return Err(ProxyError::Exists { session: id });
        }
        sessions.retain(|_, session| session.lock().idle() < self.timeout);
        if sessions.len() >= self.max_sessions {
            return Err(ProxyError::Full {
                what: "there are as many sessions as are kept, which are",
                limit: self.max_sessions as u64,
                option: "--max-sessions",
            });
        }
        let recorder = (self.folder.as_deref())
            .map(|folder| Recorder::open(folder, &id))
            .transpose()?;
        let session = Session {
            id: id.clone(),
            options,
            created: unix_seconds(),
            budget: Arc::clone(&self.budget),
            recorder,
            state: Mutex::new(State::new(1)),
        };
        session.note(&json!({
            "kind": "session", "session_id": id, "attempt": 1, "created": session.created,
            "purpose": session.options.purpose.name(), "sampling": session.options.sampling,
            "metadata": session.options.metadata,
        }))?;
        let session = Arc::new(session);
        sessions.insert(id, Arc::clone(&session));
        Ok(session)
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Session>> {
        self.lock().get(id).cloned()
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
