//! Many episodes over one engine.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::agent::{Episode, SampledTurn};
use super::{RolloutError, RolloutGroup, derive_seed};
use crate::chat::{ChatTemplate, Message, RenderOptions, ToolCallFormat, ToolSpec};
use crate::engine::{Engine, Finished, SamplingParams, SequenceId, SequenceSeed, Tokenizer};
use crate::env::Environment;

/// How long a request to stop may go unnoticed while tools run.
const STOP_LATENCY: Duration = Duration::from_millis(200);

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
}

/// The episodes of one task that [`Collector::collect`] is to run.
pub struct GroupRequest {
    /// The task's id.
    pub task_id: String,
    /// How often the task was met before in what is collected: it samples other tokens each time.
    pub visit: u64,
    /// Tokens of a turn at the most; as the collector samples unless given.
    pub max_new_tokens: Option<usize>,
    /// One environment a sample.
    pub environments: Vec<Box<dyn Environment>>,
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
#[derive(Debug, Clone, Copy, Default, PartialEq)]
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
    stop: Option<&'a AtomicBool>,
}

/// An episode whose sequence is in the engine.
#[derive(Debug)]
struct Running {
    group: usize,
    episode: Episode,
    since: Instant,
}

/// An episode back from its tools, with what they said; `None` at its end.
type Answered = (SequenceId, Running, Option<Vec<Message>>);

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
            stop: None,
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
        let mut groups: Vec<Vec<Episode>> = Vec::with_capacity(requests.len());
        let mut task_ids = Vec::with_capacity(requests.len());
        let mut running = HashMap::new();
        for (group, request) in requests.into_iter().enumerate() {
            groups.push(Vec::with_capacity(request.environments.len()));
            task_ids.push(request.task_id.clone());
            self.start_group(group, request, seed, &mut running)?;
        }
        let total = running.len();
        let mut done = 0;
        let mut stats = CollectorStats::default();
        // Tools run on the thread pool and come back through this channel.
        let (sender, receiver) = mpsc::channel::<Answered>();
        while done < total {
            if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(RolloutError::Stopped);
            }
            if self.engine.running() > 0 {
                for finished in self.engine.step()? {
                    stats.sampled_tokens += finished.tokens.len() as u64;
                    let id = finished.id;
                    let Some(episode) = running.remove(&id) else {
                        continue;
                    };
                    self.answer(id, episode, finished, sender.clone())?;
                }
            }
            // With nothing to sample, wait for a tool; else take what has come back meanwhile.
            let mut back: Vec<Answered> = Vec::new();
            if self.engine.running() == 0 && done < total {
                // Not for longer than it takes to notice that it should stop.
                back.extend(receiver.recv_timeout(STOP_LATENCY));
            }
            back.extend(receiver.try_iter());
            for (id, mut episode, messages) in back {
                let continued = match messages {
                    Some(messages) => self.extend(id, &mut episode, &messages)?,
                    None => false,
                };
                if continued {
                    episode.since = Instant::now();
                    running.insert(id, episode);
                } else {
                    self.engine.release(id)?;
                    done += 1;
                    let group = episode.group;
                    groups[group].push(episode.episode);
                    progress(done);
                }
            }
        }
        // What is kept for sequences to come would take memory from what follows, such as training.
        self.engine.trim();
        stats.seconds = started.elapsed().as_secs_f64();
        let groups = task_ids
            .into_iter()
            .zip(groups)
            .map(|(task_id, episodes)| {
                let mut trajectories: Vec<_> =
                    episodes.into_iter().map(Episode::into_trajectory).collect();
                trajectories.sort_by_key(|trajectory| trajectory.sample);
                RolloutGroup {
                    task_id,
                    trajectories,
                }
            })
            .collect();
        Ok((groups, stats))
    }

    /// Prefills a group's prompt once and starts its episodes.
    fn start_group(
        &mut self,
        group: usize,
        request: GroupRequest,
        seed: CollectionSeed<'_>,
        running: &mut HashMap<SequenceId, Running>,
    ) -> Result<(), RolloutError> {
        let episodes: Vec<Episode> = (0_u32..)
            .zip(request.environments)
            .map(|(sample, environment)| {
                Episode::start(
                    environment,
                    &request.task_id,
                    group as u64,
                    sample,
                    seed.step,
                )
            })
            .collect();
        let Some(first) = episodes.first() else {
            return Ok(());
        };
        let chat = self
            .template
            .render(first.messages(), self.tools(first), &self.config.render)
            .map_err(|source| RolloutError::Chat {
                task: request.task_id.clone(),
                source,
            })?;
        let prompt = self.tokenizer.encode_chat(&chat.text, &chat.literal)?;
        if prompt.len() + 1 >= self.config.max_context {
            return Err(RolloutError::PromptTooLong {
                task: request.task_id,
                tokens: prompt.len(),
                limit: self.config.max_context,
            });
        }
        let task_seed = seed
            .of_task(seed.purpose, &request.task_id)
            .wrapping_add(request.visit);
        let seeds: Vec<SequenceSeed> = (0..episodes.len())
            .map(|i| SequenceSeed::new(seed.run, task_seed, i as u64))
            .collect();
        let sampling = SamplingParams {
            max_new_tokens: (request.max_new_tokens).unwrap_or(self.config.sampling.max_new_tokens),
            ..self.config.sampling.clone()
        };
        let ids = self.engine.add_group(&prompt, &sampling, &seeds)?;
        for (id, mut episode) in ids.into_iter().zip(episodes) {
            episode
                .trace_mut()
                .push_prompt(&prompt)
                .expect("the trace of an episode that has not begun is empty");
            running.insert(
                id,
                Running {
                    group,
                    episode,
                    since: Instant::now(),
                },
            );
        }
        Ok(())
    }

    /// Sends a sampled turn to the episode's environment, on the thread pool.
    fn answer(
        &self,
        id: SequenceId,
        mut running: Running,
        finished: Finished,
        sender: mpsc::Sender<Answered>,
    ) -> Result<(), RolloutError> {
        let turn = SampledTurn {
            text: finished.text(self.tokenizer)?,
            format: self.tool_call_format,
            is_sampled: finished.is_sampled,
            tokens: finished.tokens,
            logprobs: finished.logprobs,
            finish: finished.finish_reason,
            seconds: running.since.elapsed().as_secs_f64(),
        };
        rayon::spawn(move || {
            // A panic on the pool would end the process; here it ends one episode.
            let answer = AssertUnwindSafe(|| running.episode.take_turn(&turn));
            let messages = catch_unwind(answer).unwrap_or_else(|_| {
                running
                    .episode
                    .fail(&std::io::Error::other("the environment panicked"));
                None
            });
            // The receiver is gone only when the collection failed; then nobody waits.
            let _ = sender.send((id, running, messages));
        });
        Ok(())
    }

    /// Appends what the environment said; returns whether the episode goes on.
    fn extend(
        &mut self,
        id: SequenceId,
        running: &mut Running,
        messages: &[Message],
    ) -> Result<bool, RolloutError> {
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
            episode.close();
            return Ok(false);
        }
        episode.trace_mut().push_observation(&suffix);
        self.engine.extend(id, &suffix)?;
        Ok(true)
    }

    fn tools<'e>(&self, episode: &'e Episode) -> &'e [ToolSpec] {
        if self.config.use_tools {
            episode.environment().tools()
        } else {
            &[]
        }
    }
}
