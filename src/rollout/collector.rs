//! Many episodes over one engine.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::Span;

use super::agent::{Episode, SampledTurn};
use super::paused::{OpenTurn, Origin, PausedEpisode, PausedGroup};
use super::tools::{spawn_tools, spawn_waiting};
use super::{RolloutError, RolloutGroup, derive_seed};
use crate::chat::{ChatTemplate, Message, RenderOptions, ToolCallFormat, ToolSpec};
use crate::engine::{
    Engine, FinishReason, Finished, SamplingParams, SequenceId, SequenceSeed, Tokenizer,
};
use crate::env::Environment;

/// How long a request to stop may go unnoticed while tools run.
pub(super) const STOP_LATENCY: Duration = Duration::from_millis(200);
/// Time between looks at whether an environment elsewhere has begun.
pub(super) const RESET_POLL: Duration = Duration::from_millis(5);

/// Settings of [`Collector`].
#[derive(Debug, Clone)]
pub struct CollectorConfig {
    /// How tokens are sampled; the stop tokens are the model's.
    pub sampling: SamplingParams,
    /// Tokens of an episode, prompt included, before it ends as truncated.
    pub max_context: usize,
    /// Rendering options of the chat template.
    pub render: RenderOptions,
    /// Whether the tools are given to the chat template.
    pub use_tools: bool,
    /// How the model writes tool calls; as its chat template says unless given.
    pub tool_call_format: Option<ToolCallFormat>,
    /// Wall-clock time of an episode in one collection, of which its tools' calls have deadlines of their
    /// own. One that takes longer has failed, by our fault.
    pub deadline: Option<Duration>,
}

/// The episodes of one task that [`Collector::collect`] is to run.
pub struct GroupRequest {
    /// The task's id.
    pub task_id: String,
    /// How often the task was met before in what is collected: it samples other tokens each time.
    pub visit: u64,
    /// The number of its first sample: each samples other tokens.
    pub first_sample: u32,
    /// Tokens of a turn at the most; as the collector samples unless given.
    pub max_new_tokens: Option<usize>,
    /// One environment a sample.
    pub environments: Vec<Box<dyn Environment>>,
}

impl GroupRequest {
    /// Lets all environments begin with what their resets wait for.
    fn prepare(&mut self) {
        for environment in &mut self.environments {
            environment.prepare();
        }
    }

    /// Returns the same samples in several requests, of at most `most` each, which is at least 1.
    #[must_use]
    pub fn split(self, most: usize) -> Vec<Self> {
        let most = most.max(1);
        let mut parts = Vec::with_capacity(self.environments.len().div_ceil(most));
        let mut environments = self.environments.into_iter().peekable();
        let mut first_sample = self.first_sample;
        while environments.peek().is_some() {
            let part: Vec<_> = environments.by_ref().take(most).collect();
            let count = u32::try_from(part.len()).unwrap_or(u32::MAX);
            parts.push(Self {
                task_id: self.task_id.clone(),
                visit: self.visit,
                first_sample,
                max_new_tokens: self.max_new_tokens,
                environments: part,
            });
            first_sample = first_sample.saturating_add(count);
        }
        parts
    }
}

impl std::fmt::Debug for GroupRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupRequest")
            .field("task_id", &self.task_id)
            .field("samples", &self.environments.len())
            .finish()
    }
}

/// Names the random streams of one collection.
#[derive(Debug, Clone, Copy)]
pub struct CollectionSeed<'a> {
    /// Seed of the run.
    pub run: u64,
    /// What the collection is for, such as `train`; other purposes draw other numbers.
    pub purpose: &'a str,
    /// The policy's step.
    pub step: u64,
    /// Which collection of the step it is, from 0.
    pub draw: u64,
}

impl CollectionSeed<'_> {
    /// Returns the seed of what is done with a task for `purpose`.
    #[must_use]
    pub fn of_task(&self, purpose: &str, task_id: &str) -> u64 {
        // A later draw of a step is another one of the same task, like a later visit.
        derive_seed(self.run, purpose, self.step, task_id).wrapping_add(self.draw << 32)
    }
}

/// What one collection cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CollectorStats {
    /// Sampled tokens.
    pub sampled_tokens: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// Runs episodes: samples turns in batches, and tools beside them.
#[derive(Debug)]
pub struct Collector<'a> {
    engine: &'a mut Engine,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    config: &'a CollectorConfig,
    tool_call_format: ToolCallFormat,
    policy_step: Option<u64>,
    stop: Option<&'a AtomicBool>,
}

/// When episodes wait for the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PauseRule {
    /// Tokens that an episode may sample in this step.
    pub max_step_tokens: usize,
    /// Groups that began before this step are waited for.
    pub oldest: u64,
}

impl PauseRule {
    /// Returns how many tokens the episodes of a group may sample.
    fn left(self, origin: Origin) -> usize {
        if origin.step < self.oldest {
            usize::MAX
        } else {
            self.max_step_tokens
        }
    }
}

/// An episode whose sequence is in the engine.
#[derive(Debug)]
struct Running {
    group: usize,
    episode: Episode,
    /// What its turn had before it was continued.
    turn: OpenTurn,
    /// Tokens of a turn at the most.
    max_new_tokens: usize,
    /// Tokens that it may still sample before it is paused.
    left: usize,
    /// When it has taken too long.
    deadline: Option<Instant>,
    since: Instant,
    /// Of the turn, while it is sampled.
    span: Span,
}

impl Running {
    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now > deadline)
    }
}

/// What the episodes of a group have in common as they start.
#[derive(Debug, Clone, Copy)]
struct Started {
    group: usize,
    /// Tokens of a turn at the most.
    max_new_tokens: usize,
    /// Tokens that each may sample before it is paused.
    left: usize,
}

/// What is collected.
#[derive(Debug, Default)]
struct Collection {
    groups: Vec<PausedGroup>,
    running: HashMap<SequenceId, Running>,
    /// Episodes that run, or are at their tools.
    active: usize,
    done: usize,
    stats: CollectorStats,
}

/// What an episode does behind an answer.
enum Next {
    Turn,
    Pause,
    /// It is graded, for there is no room to go on.
    Close,
    End,
}

/// An episode back from its tools, with what they said; `None` at its end.
type Answered = (SequenceId, Running, Option<Vec<Message>>);

/// Ends an episode whose context is full, on the tools' threads.
fn close(id: SequenceId, mut running: Running, sender: mpsc::Sender<Answered>) {
    let waits = running.episode.environment().waits();
    let run = move || {
        running.episode.close();
        // The receiver is gone only when the collection failed; then nobody waits.
        let _ = sender.send((id, running, None));
    };
    if waits {
        spawn_waiting(run);
    } else {
        spawn_tools(run);
    }
}

impl<'a> Collector<'a> {
    /// Returns a collector that samples with `engine`.
    pub fn new(
        engine: &'a mut Engine,
        tokenizer: &'a Tokenizer,
        template: &'a ChatTemplate,
        config: &'a CollectorConfig,
    ) -> Self {
        let detect = || ToolCallFormat::detect(template.source());
        Self {
            engine,
            tokenizer,
            template,
            config,
            tool_call_format: config.tool_call_format.unwrap_or_else(detect),
            policy_step: None,
            stop: None,
        }
    }

    /// Says which step the policy is before, if not that of the collection.
    #[must_use]
    pub fn of_policy(self, step: u64) -> Self {
        Self {
            policy_step: Some(step),
            ..self
        }
    }

    /// Ends collections with [`RolloutError::Stopped`] once `stop` is true. The engine keeps their
    /// sequences then.
    #[must_use]
    pub fn until(self, stop: &'a AtomicBool) -> Self {
        Self {
            stop: Some(stop),
            ..self
        }
    }

    /// Runs all episodes to their end; `progress` is told how many are done.
    ///
    /// An episode that we fail has no reward; it does not fail the collection.
    ///
    /// # Errors
    ///
    /// Fails where it is stopped, where sampling fails, where the template cannot render a task, or
    /// where a task's
    /// prompt leaves no room to answer.
    pub fn collect(
        &mut self,
        requests: Vec<GroupRequest>,
        seed: CollectionSeed<'_>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(Vec<RolloutGroup>, CollectorStats), RolloutError> {
        let started = Instant::now();
        let mut all = Collection::default();
        let mut requests = requests;
        requests.iter_mut().for_each(GroupRequest::prepare);
        for request in requests {
            self.start_group(request, seed, usize::MAX, &mut all)?;
        }
        self.run(&mut all, progress)?;
        let (groups, _) = self.end(&mut all, started);
        Ok((groups, all.stats))
    }

    /// Runs episodes until they are done or have sampled what `rule` lets them: those of `carried`, which
    /// were paused before, and of `requests`, each with its own collection's seed. Returns the groups that
    /// are whole and those that are not. With none whole but those that we failed, all go on for another stretch.
    ///
    /// # Errors
    ///
    /// As for [`Collector::collect`].
    pub fn collect_paused(
        &mut self,
        carried: Vec<PausedGroup>,
        requests: Vec<(GroupRequest, CollectionSeed<'_>)>,
        seed: CollectionSeed<'_>,
        rule: PauseRule,
    ) -> Result<(Vec<RolloutGroup>, Vec<PausedGroup>, CollectorStats), RolloutError> {
        let started = Instant::now();
        let mut all = Collection {
            groups: carried,
            ..Collection::default()
        };
        let mut requests = requests;
        (requests.iter_mut()).for_each(|(request, _)| request.prepare());
        let mut requests = Some(requests);
        for round in 0.. {
            for group in 0..all.groups.len() {
                for paused in std::mem::take(&mut all.groups[group].paused) {
                    self.resume(group, paused, seed, round, rule, &mut all)?;
                }
            }
            for (request, seed) in requests.take().into_iter().flatten() {
                self.start_group(request, seed, rule.max_step_tokens, &mut all)?;
            }
            self.run(&mut all, &mut |_| {})?;
            let is_paused = |group: &PausedGroup| !group.paused.is_empty();
            if !all.groups.iter().any(is_paused) || all.groups.iter().any(PausedGroup::is_done) {
                break;
            }
        }
        let (whole, paused) = self.end(&mut all, started);
        Ok((whole, paused, all.stats))
    }

    /// Ends a collection: returns the whole groups, and those that are not.
    fn end(
        &mut self,
        all: &mut Collection,
        started: Instant,
    ) -> (Vec<RolloutGroup>, Vec<PausedGroup>) {
        // What is kept for sequences to come would take memory from what follows, such as training.
        self.engine.trim();
        all.stats.seconds = started.elapsed().as_secs_f64();
        let (mut whole, mut paused) = (Vec::new(), Vec::new());
        for group in std::mem::take(&mut all.groups) {
            match group.finish() {
                Ok(group) => whole.push(group),
                Err(group) => paused.push(group),
            }
        }
        (whole, paused)
    }

    /// Runs what is active until it is done or paused.
    fn run(
        &mut self,
        all: &mut Collection,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), RolloutError> {
        // Tools run on threads of their own and come back through this channel.
        let (sender, receiver) = mpsc::channel::<Answered>();
        while all.active > 0 {
            if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(RolloutError::Stopped);
            }
            if self.config.deadline.is_some() {
                let now = Instant::now();
                let late = all.running.extract_if(|_, running| running.is_late(now));
                for (id, mut running) in late.collect::<Vec<_>>() {
                    self.fail_late(&mut running);
                    self.finish(id, running, all, progress)?;
                }
            }
            if self.engine.running() > 0 {
                for finished in self.engine.step()? {
                    self.take(finished, all, &sender)?;
                }
            }
            // With nothing to sample, wait for a tool; else take what has come back meanwhile.
            let mut back: Vec<Answered> = Vec::new();
            if self.engine.running() == 0 && all.active > 0 {
                // Not for longer than it takes to notice that it should stop.
                back.extend(receiver.recv_timeout(STOP_LATENCY));
            }
            back.extend(receiver.try_iter());
            for (id, mut running, messages) in back {
                let next = match messages {
                    Some(_) if running.is_late(Instant::now()) => {
                        self.fail_late(&mut running);
                        Next::End
                    }
                    Some(messages) => self.extend(id, &mut running, &messages)?,
                    None => Next::End,
                };
                match next {
                    Next::Turn => {
                        running.since = Instant::now();
                        running.span = running.episode.turn_span();
                        all.running.insert(id, running);
                    }
                    Next::Pause => self.pause(id, running, all)?,
                    Next::Close => close(id, running, sender.clone()),
                    Next::End => self.finish(id, running, all, progress)?,
                }
            }
        }
        Ok(())
    }

    /// Fails an episode that takes longer than it may.
    fn fail_late(&self, running: &mut Running) {
        let task = running.episode.task_id().to_owned();
        let limit = self.config.deadline.unwrap_or_default();
        running.episode.fail(&RolloutError::Late { task, limit });
    }

    /// Takes an episode that is done.
    fn finish(
        &mut self,
        id: SequenceId,
        running: Running,
        all: &mut Collection,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), RolloutError> {
        self.engine.release(id)?;
        all.active -= 1;
        all.done += 1;
        let done = running.episode.into_trajectory();
        all.groups[running.group].done.push(done);
        progress(all.done);
        Ok(())
    }

    /// Takes what was sampled of a turn: the whole turn goes to its tools, a part of one waits.
    fn take(
        &mut self,
        mut finished: Finished,
        all: &mut Collection,
        sender: &mpsc::Sender<Answered>,
    ) -> Result<(), RolloutError> {
        let id = finished.id;
        let sampled = finished.tokens.len();
        all.stats.sampled_tokens += sampled as u64;
        let Some(mut running) = all.running.remove(&id) else {
            return Ok(());
        };
        running.left = running.left.saturating_sub(sampled);
        let tokens = i64::try_from(sampled).unwrap_or(i64::MAX);
        std::mem::replace(&mut running.span, Span::none()).record("tokens", tokens);
        let seconds = running.turn.seconds + running.since.elapsed().as_secs_f64();
        std::mem::take(&mut running.turn).continue_with(&mut finished);
        let in_turn = finished.tokens.len();
        let in_context = running.episode.trace_mut().len() + in_turn;
        let max_context = self.config.max_context.min(self.engine.max_context());
        // Cut off by nothing but the step's bound.
        let is_paused = finished.finish_reason == FinishReason::Length
            && running.left == 0
            && in_turn < running.max_new_tokens
            && in_context < max_context;
        if is_paused {
            running.turn = OpenTurn {
                tokens: finished.tokens,
                logprobs: finished.logprobs,
                seconds,
            };
            return self.pause(id, running, all);
        }
        self.answer(id, running, finished, seconds, sender.clone())
    }

    /// Keeps an episode for the next step.
    fn pause(
        &mut self,
        id: SequenceId,
        running: Running,
        all: &mut Collection,
    ) -> Result<(), RolloutError> {
        self.engine.release(id)?;
        all.active -= 1;
        let Running {
            group,
            episode,
            turn,
            ..
        } = running;
        all.groups[group]
            .paused
            .push(PausedEpisode { episode, turn });
        Ok(())
    }

    /// Goes on with an episode, by the policy as it is now.
    fn resume(
        &mut self,
        group: usize,
        paused: PausedEpisode,
        seed: CollectionSeed<'_>,
        round: u64,
        rule: PauseRule,
        all: &mut Collection,
    ) -> Result<(), RolloutError> {
        let PausedEpisode { mut episode, turn } = paused;
        let PausedGroup {
            origin,
            task_id,
            max_new_tokens,
            ..
        } = &all.groups[group];
        let max_new_tokens = *max_new_tokens;
        let left = rule.left(*origin);
        let sample = episode.trajectory().sample;
        let seed_of_it = origin.later_seed(seed, round, task_id, sample);
        let mut tokens = episode.trajectory().trace.ids().to_vec();
        tokens.extend_from_slice(&turn.tokens);
        episode.go_on(tokens.len(), self.policy_step.unwrap_or(seed.step));
        let in_turn = max_new_tokens.saturating_sub(turn.tokens.len());
        let sampling = self.sampling(in_turn.min(left));
        let id = self.engine.add(tokens, sampling, seed_of_it)?;
        all.active += 1;
        all.running.insert(
            id,
            Running {
                group,
                span: episode.turn_span(),
                episode,
                turn,
                max_new_tokens,
                left,
                deadline: self.deadline(),
                since: Instant::now(),
            },
        );
        Ok(())
    }

    /// Returns when an episode that begins now has taken too long.
    fn deadline(&self) -> Option<Instant> {
        let deadline = self.config.deadline?;
        Instant::now().checked_add(deadline)
    }

    /// Returns how a turn of at most so many tokens is sampled.
    fn sampling(&self, max_new_tokens: usize) -> SamplingParams {
        SamplingParams {
            max_new_tokens,
            ..self.config.sampling.clone()
        }
    }

    /// Resets a group's environments and starts its episodes; one whose environment fails has failed.
    fn start_group(
        &mut self,
        mut request: GroupRequest,
        seed: CollectionSeed<'_>,
        left: usize,
        all: &mut Collection,
    ) -> Result<(), RolloutError> {
        let group = all.groups.len();
        let default = self.config.sampling.max_new_tokens;
        let max_new_tokens = request.max_new_tokens.unwrap_or(default);
        let origin = Origin {
            step: seed.step,
            draw: seed.draw,
            visit: request.visit,
        };
        all.groups.push(PausedGroup {
            task_id: request.task_id.clone(),
            origin,
            max_new_tokens,
            done: Vec::with_capacity(request.environments.len()),
            paused: Vec::new(),
        });
        // Nobody waits for a server that does not answer once the run is to stop.
        for environment in &mut request.environments {
            while !environment.is_prepared() {
                if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                    return Err(RolloutError::Stopped);
                }
                std::thread::sleep(RESET_POLL);
            }
        }
        let policy_step = self.policy_step.unwrap_or(seed.step);
        let episodes: Vec<Episode> = (request.first_sample..)
            .zip(request.environments)
            .map(|(sample, environment)| {
                Episode::start(
                    environment,
                    &request.task_id,
                    group as u64,
                    sample,
                    policy_step,
                )
            })
            .collect();
        let (failed, mut waiting): (Vec<_>, Vec<_>) =
            episodes.into_iter().partition(Episode::has_failed);
        all.done += failed.len();
        let failed = failed.into_iter().map(Episode::into_trajectory);
        all.groups[group].done.extend(failed);
        let task_seed = origin.task_seed(seed.run, seed.purpose, &request.task_id);
        let started = Started {
            group,
            max_new_tokens,
            left,
        };
        // Their environments say the same as a rule; what one says for itself has a prompt of its own.
        while let Some(first) = waiting.first() {
            let opening = first.messages().to_vec();
            let (alike, others) = waiting
                .into_iter()
                .partition(|episode| episode.messages() == opening);
            waiting = others;
            self.start_alike(alike, started, seed.run, task_seed, all)?;
        }
        Ok(())
    }

    /// Prefills the prompt of some of a group's episodes once, and starts them.
    fn start_alike(
        &mut self,
        episodes: Vec<Episode>,
        started: Started,
        run_seed: u64,
        task_seed: u64,
        all: &mut Collection,
    ) -> Result<(), RolloutError> {
        let Some(first) = episodes.first() else {
            return Ok(());
        };
        let Started {
            group,
            max_new_tokens,
            left,
        } = started;
        let chat = self
            .template
            .render(first.messages(), self.tools(first), &self.config.render)
            .map_err(|source| RolloutError::Chat {
                task: first.task_id().to_owned(),
                source,
            })?;
        let prompt = self.tokenizer.encode_chat(&chat.text, &chat.literal)?;
        if prompt.len() + 1 >= self.config.max_context {
            let too_long = RolloutError::PromptTooLong {
                task: first.task_id().to_owned(),
                tokens: prompt.len(),
                limit: self.config.max_context,
            };
            if !first.environment().waits() {
                return Err(too_long);
            }
            // What an environment elsewhere says is not known before, and no reason to end the others.
            all.done += episodes.len();
            for mut episode in episodes {
                episode.fail(&too_long);
                all.groups[group].done.push(episode.into_trajectory());
            }
            return Ok(());
        }
        let seeds: Vec<SequenceSeed> = (episodes.iter())
            .map(|episode| u64::from(episode.trajectory().sample))
            .map(|sample| SequenceSeed::new(run_seed, task_seed, sample))
            .collect();
        let sampling = self.sampling(max_new_tokens.min(left));
        let ids = self.engine.add_group(&prompt, &sampling, &seeds)?;
        all.active += ids.len();
        for (id, mut episode) in ids.into_iter().zip(episodes) {
            episode
                .trace_mut()
                .push_prompt(&prompt)
                .expect("the trace of an episode that has not begun is empty");
            all.running.insert(
                id,
                Running {
                    group,
                    span: episode.turn_span(),
                    episode,
                    turn: OpenTurn::default(),
                    max_new_tokens,
                    left,
                    deadline: self.deadline(),
                    since: Instant::now(),
                },
            );
        }
        Ok(())
    }

    /// Sends a sampled turn to the episode's environment, on the tools' threads.
    fn answer(
        &self,
        id: SequenceId,
        mut running: Running,
        finished: Finished,
        seconds: f64,
        sender: mpsc::Sender<Answered>,
    ) -> Result<(), RolloutError> {
        let turn = SampledTurn {
            text: finished.text(self.tokenizer)?,
            format: self.tool_call_format,
            is_sampled: finished.is_sampled,
            tokens: finished.tokens,
            logprobs: finished.logprobs,
            finish: finished.finish_reason,
            seconds,
        };
        let waits = running.episode.environment().waits();
        let run = move || {
            let messages = running.episode.take_turn(&turn);
            // The receiver is gone only when the collection failed; then nobody waits.
            let _ = sender.send((id, running, messages));
        };
        if waits {
            spawn_waiting(run);
        } else {
            spawn_tools(run);
        }
        Ok(())
    }

    /// Appends what the environment said; returns how the episode goes on.
    fn extend(
        &mut self,
        id: SequenceId,
        running: &mut Running,
        messages: &[Message],
    ) -> Result<Next, RolloutError> {
        let episode = &mut running.episode;
        let end_of_turn = self.tokenizer.eos_token().unwrap_or_default();
        let chat = self
            .template
            .tool_suffix(
                messages,
                self.tools(episode),
                end_of_turn,
                &self.config.render,
            )
            .map_err(|source| RolloutError::Chat {
                task: episode.task_id().to_owned(),
                source,
            })?;
        let suffix = self.tokenizer.encode_chat(&chat.text, &chat.literal)?;
        if episode.trace_mut().len() + suffix.len() + 1 >= self.config.max_context {
            return Ok(Next::Close);
        }
        episode.trace_mut().push_observation(&suffix);
        if running.left == 0 {
            return Ok(Next::Pause);
        }
        let in_turn = running.max_new_tokens.min(running.left);
        self.engine.set_max_new_tokens(id, in_turn)?;
        self.engine.extend(id, &suffix)?;
        Ok(Next::Turn)
    }

    fn tools<'e>(&self, episode: &'e Episode) -> &'e [ToolSpec] {
        if self.config.use_tools {
            episode.environment().tools()
        } else {
            &[]
        }
    }
}
