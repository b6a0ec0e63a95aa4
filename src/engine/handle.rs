//! An engine on a thread of its own, for callers that wait asynchronously.
//!
//! [`EngineHandle::start`] gives the engine to a thread, which steps while there is something to
//! sample. Requests that arrive meanwhile join the next step. Their number is bounded, and a request
//! beyond it is refused at once. Who drops a [`Generation`] no longer wants it: its sequences are
//! released before the next step.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::mpsc as events;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    Engine, EngineError, EngineStats, Finished, Guide, RequestLimits, SamplingParams, SequenceId,
    SequenceSeed, TokenLogprob,
};

/// What to generate.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// How to sample.
    pub params: SamplingParams,
    /// One completion for each.
    pub seeds: Vec<SequenceSeed>,
    /// What each completion must look like.
    pub guide: Option<Guide>,
    /// Whether tokens are told as they are sampled, not only the whole turn.
    pub stream: bool,
}

/// A token of a turn that is under way.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// The token and how likely it was.
    pub token: TokenLogprob,
    /// The likeliest tokens in its place, if they were asked for.
    pub top: Vec<TokenLogprob>,
}

/// What happened to a request.
#[derive(Debug)]
pub enum GenerateEvent {
    /// One completion got longer; only told if the request is to stream.
    Tokens {
        /// Which completion.
        index: usize,
        /// Its next tokens.
        tokens: Vec<GeneratedToken>,
    },
    /// One completion is whole.
    Finished {
        /// Which completion.
        index: usize,
        /// All of it.
        finished: Box<Finished>,
    },
    /// The request cannot be served; nothing follows.
    Failed(EngineError),
}

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BusyError {
    /// As many completions as are let in are under way.
    #[error("{asked} completions do not fit beside those under way, at most {limit} are let in")]
    Full {
        /// Completions of the request.
        asked: usize,
        /// Most at a time.
        limit: usize,
    },
    /// The engine's thread has ended.
    #[error("the engine has stopped")]
    Stopped,
}

/// A request under way. To drop it is to cancel it.
#[derive(Debug)]
pub struct Generation {
    events: events::UnboundedReceiver<GenerateEvent>,
}

impl Generation {
    /// Returns the next event; `None` when there is none to come. It is cancel-safe.
    pub async fn next(&mut self) -> Option<GenerateEvent> {
        self.events.recv().await
    }

    /// As [`Generation::next`], for callers that block.
    pub fn next_blocking(&mut self) -> Option<GenerateEvent> {
        self.events.blocking_recv()
    }
}

/// What the engine is doing.
#[derive(Debug, Clone, Copy, Default)]
pub struct EngineStatus {
    /// What it has done.
    pub stats: EngineStats,
    /// Sequences that are not finished.
    pub running: usize,
    /// Tokens that sequences hold memory for.
    pub cached_tokens: usize,
    /// Whether its thread has ended.
    pub is_stopped: bool,
}

struct Submitted {
    request: GenerateRequest,
    events: events::UnboundedSender<GenerateEvent>,
    slots: OwnedSemaphorePermit,
}

/// Room for the completions of a request that is yet to be submitted.
#[derive(Debug)]
pub struct Places(OwnedSemaphorePermit);

/// The front of an engine's thread; cheap to clone. The thread ends when all fronts are gone and
/// all requests are served.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    submissions: mpsc::Sender<Submitted>,
    slots: Arc<Semaphore>,
    max_requests: usize,
    limits: RequestLimits,
    status: Arc<Mutex<EngineStatus>>,
}

impl EngineHandle {
    /// Moves `engine` to a thread of its own; at most `max_requests` completions are let in at a
    /// time, those that wait included.
    ///
    /// # Errors
    ///
    /// Fails if the system has no thread to give.
    pub fn start(engine: Engine, max_requests: usize) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (submissions, inbox) = mpsc::channel();
        let status = Arc::new(Mutex::new(EngineStatus::default()));
        let max_requests = max_requests.min(Semaphore::MAX_PERMITS);
        let handle = Self {
            submissions,
            slots: Arc::new(Semaphore::new(max_requests)),
            max_requests,
            limits: engine.limits(),
            status: Arc::clone(&status),
        };
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let worker = Worker {
                    engine,
                    active: BTreeMap::new(),
                    status,
                    is_broken: false,
                };
                worker.run(&inbox);
            })?;
        Ok((handle, thread))
    }

    /// Hands a request to the engine.
    ///
    /// # Errors
    ///
    /// [`BusyError::Full`] if there is no room for it now, [`BusyError::Stopped`] if there never
    /// will be.
    pub fn submit(&self, request: GenerateRequest) -> Result<Generation, BusyError> {
        let places = self.reserve(request.seeds.len())?;
        self.submit_to(places, request)
    }

    /// Takes the places of `asked` completions, for a request that is not ready yet.
    ///
    /// # Errors
    ///
    /// [`BusyError::Full`] if there is no room for them now.
    pub fn reserve(&self, asked: usize) -> Result<Places, BusyError> {
        let full = BusyError::Full {
            asked,
            limit: self.max_requests,
        };
        let permits = u32::try_from(asked).map_err(|_| full)?;
        let slots = Arc::clone(&self.slots).try_acquire_many_owned(permits);
        slots.map(Places).map_err(|_| full)
    }

    /// As [`EngineHandle::submit`], for a request whose places were reserved.
    ///
    /// # Errors
    ///
    /// [`BusyError::Stopped`] if the engine's thread has ended.
    pub fn submit_to(
        &self,
        places: Places,
        request: GenerateRequest,
    ) -> Result<Generation, BusyError> {
        let (sender, events) = events::unbounded_channel();
        let submitted = Submitted {
            request,
            events: sender,
            slots: places.0,
        };
        match self.submissions.send(submitted) {
            Ok(()) => Ok(Generation { events }),
            Err(_) => Err(BusyError::Stopped),
        }
    }

    /// Returns the bounds of every request; one that does not keep to them is told so by
    /// [`GenerateEvent::Failed`].
    pub fn limits(&self) -> RequestLimits {
        self.limits
    }

    /// Returns the most completions at a time.
    pub fn max_requests(&self) -> usize {
        self.max_requests
    }

    /// Returns what the engine is doing.
    pub fn status(&self) -> EngineStatus {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One completion under way.
struct Active {
    index: usize,
    events: events::UnboundedSender<GenerateEvent>,
    is_streamed: bool,
    /// Tokens that were told.
    told: usize,
    /// Lets the next request in when the last completion of this one is gone.
    slots: Arc<OwnedSemaphorePermit>,
}

struct Worker {
    engine: Engine,
    active: BTreeMap<SequenceId, Active>,
    status: Arc<Mutex<EngineStatus>>,
    /// Whether nothing can be computed any more.
    is_broken: bool,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.update_status(true);
    }
}

impl Worker {
    fn run(mut self, inbox: &mpsc::Receiver<Submitted>) {
        loop {
            if self.active.is_empty() {
                self.update_status(false);
                match inbox.recv() {
                    Ok(submitted) => self.begin(submitted),
                    Err(_) => return,
                }
            }
            while let Ok(submitted) = inbox.try_recv() {
                self.begin(submitted);
            }
            self.cancel();
            self.step();
            if self.is_broken {
                return;
            }
            self.update_status(false);
        }
    }

    fn begin(&mut self, submitted: Submitted) {
        let Submitted {
            request,
            events,
            slots,
        } = submitted;
        match self.add(&request) {
            Ok(ids) => {
                let slots = Arc::new(slots);
                for (index, id) in ids.into_iter().enumerate() {
                    let active = Active {
                        index,
                        events: events.clone(),
                        is_streamed: request.stream,
                        told: 0,
                        slots: Arc::clone(&slots),
                    };
                    self.active.insert(id, active);
                }
            }
            Err(error) => {
                drop(slots);
                // Nobody listens any more if this fails.
                drop(events.send(GenerateEvent::Failed(error)));
            }
        }
    }

    fn add(&mut self, request: &GenerateRequest) -> Result<Vec<SequenceId>, EngineError> {
        let engine = &mut self.engine;
        let ids = engine.add_group(&request.prompt, &request.params, &request.seeds)?;
        let Some(guide) = &request.guide else {
            return Ok(ids);
        };
        let guided = ids
            .iter()
            .try_for_each(|&id| engine.set_guide(id, guide.clone()));
        if let Err(error) = guided {
            for id in ids {
                engine.release(id)?;
            }
            return Err(error);
        }
        Ok(ids)
    }

    /// Releases what nobody waits for any more.
    fn cancel(&mut self) {
        let gone = |active: &Active| active.events.is_closed();
        let ids: Vec<SequenceId> = self
            .active
            .iter()
            .filter(|(_, active)| gone(active))
            .map(|(&id, _)| id)
            .collect();
        for id in ids {
            tracing::debug!(sequence = %id, "request cancelled");
            self.end(id);
        }
    }

    fn end(&mut self, id: SequenceId) -> Option<Active> {
        if let Err(error) = self.engine.release(id) {
            tracing::error!(%error, "failed to release a sequence");
        }
        self.active.remove(&id)
    }

    fn step(&mut self) {
        let finished = match self.engine.step() {
            Ok(finished) => finished,
            Err(error) => return self.fail(&error),
        };
        for (&id, active) in &mut self.active {
            if active.is_streamed
                && let Ok(turn) = self.engine.turn(id)
            {
                let tokens = tokens_from(
                    active.told,
                    turn.tokens,
                    turn.logprobs,
                    turn.kept_logprobs,
                    turn.top_logprobs,
                );
                active.tell(tokens);
            }
        }
        let mut ended = Vec::with_capacity(finished.len());
        for finished in finished {
            if let Some(mut active) = self.end(finished.id) {
                if active.is_streamed {
                    let tokens = tokens_from(
                        active.told,
                        &finished.tokens,
                        &finished.logprobs,
                        &finished.kept_logprobs,
                        &finished.top_logprobs,
                    );
                    active.tell(tokens);
                }
                ended.push((active.without_slots(), finished));
            }
        }
        // Who is told that it is over may ask again at once, and finds room.
        self.update_status(false);
        for ((index, events), finished) in ended {
            let finished = Box::new(finished);
            drop(events.send(GenerateEvent::Finished { index, finished }));
        }
    }

    /// Ends all requests after a fault of the model: none of them can go on. What a GPU met, such as an
    /// illegal access, it meets in all that follows, so its engine ends; who watches the server starts it
    /// again.
    fn fail(&mut self, error: &EngineError) {
        tracing::error!(%error, "a step of the engine failed");
        self.is_broken = !self.engine.decoder().device().is_cpu();
        let ids: Vec<SequenceId> = self.active.keys().copied().collect();
        let ended: Vec<_> = ids
            .into_iter()
            .filter_map(|id| self.end(id))
            .map(Active::without_slots)
            .collect();
        self.update_status(false);
        for (_, events) in ended {
            let message = error.to_string();
            drop(events.send(GenerateEvent::Failed(EngineError::Step { message })));
        }
    }

    fn update_status(&self, is_stopped: bool) {
        let status = EngineStatus {
            stats: self.engine.stats(),
            running: self.engine.running(),
            cached_tokens: self.engine.cached_tokens(),
            is_stopped,
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }
}

impl Active {
    /// Gives up its part of the request's places; returns whom to tell of the end, and of which
    /// completion.
    fn without_slots(self) -> (usize, events::UnboundedSender<GenerateEvent>) {
        drop(self.slots);
        (self.index, self.events)
    }

    fn tell(&mut self, tokens: Vec<GeneratedToken>) {
        if !tokens.is_empty() {
            self.told += tokens.len();
            let index = self.index;
            drop(self.events.send(GenerateEvent::Tokens { index, tokens }));
        }
    }
}

/// Returns the tokens of a turn from the place `start` on.
fn tokens_from(
    start: usize,
    tokens: &[u32],
    logprobs: &[f32],
    kept_logprobs: &[f32],
    top_logprobs: &[Vec<TokenLogprob>],
) -> Vec<GeneratedToken> {
    (start..tokens.len())
        .map(|at| GeneratedToken {
            token: TokenLogprob {
                token: tokens[at],
                logprob: logprobs[at],
                kept_logprob: kept_logprobs[at],
            },
            top: top_logprobs.get(at).cloned().unwrap_or_default(),
        })
        .collect()
}
