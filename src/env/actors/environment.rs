//! One episode of a task in an actor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indexmap::IndexMap;
use serde_json::Value;

use super::patch::Untold;
use super::slots::Slot;
use super::start::GroupStart;
use super::tools::{BASH, EDIT, Ran, SUBMIT, actor_tools, bash};
use super::trial::{Judged, Trial};
use super::workplace::run_ends;
use super::{InstanceGrader, edit};
use crate::actor::{Actor, ActorError};
use crate::chat::{Message, ParsedTurn, ToolCall, ToolSpec};
use crate::env::{EnvError, Environment, EpisodeStats, EpisodeStatus, StepResult};
use crate::grader::swebench::SwebenchBonus;
use crate::grader::{GradeUsage, Verdict, VerdictStatus};
use crate::task::harbor::HarborTask;
use crate::task::swebench::SwebenchInstance;
use crate::task::{RepositoryTask, Task};
use crate::trajectory::ToolRun;

/// What a policy is told first, unless the run says otherwise.
const SYSTEM_PROMPT: &str = "You work on a task in a Linux sandbox without a network, with the tools `bash`, `edit` \
    and `submit`. Look around, do what is asked, check it, and call `submit` when you are done.";

/// What a policy is told that called no tool.
const NO_CALL: &str =
    "You called no tool. Work with `bash` and `edit`, and call `submit` when you are done.";

/// Settings of [`ActorEnvironment`].
#[derive(Debug, Clone, PartialEq)]
pub struct ActorSettings {
    /// Opening system message; one that explains the tools unless given.
    pub system_prompt: Option<String>,
    /// Assistant turns before what there is is judged; of a task with steps, turns of each.
    pub max_turns: usize,
    /// Characters of tool output shown to the model; the middle is cut.
    pub max_output_chars: usize,
    /// How long a command may take.
    pub command_timeout: Duration,
    /// How long the tests of an instance of SWE-bench may take.
    pub test_timeout: Duration,
    /// What a patch of SWE-bench earns on top.
    pub bonus: SwebenchBonus,
}

/// An actor that the policy has.
#[derive(Debug)]
struct Live {
    /// Ends before its room is free.
    actor: Box<dyn Actor>,
    slot: Slot,
}

/// One episode of a task of Harbor or SWE-bench.
///
/// The policy has an actor from its first call of a tool on: `bash` runs a command, `edit` shows and changes
/// files, `submit` ends the task, or its step. What the actor is like then is judged: for SWE-bench the patch
/// that was made, in another actor; for Harbor as its verifier says. A policy whose turns or tokens are over is
/// judged by what it has left. One that brings its actor down has earned nothing.
#[derive(Debug)]
pub struct ActorEnvironment {
    task: Arc<Task>,
    start: Arc<GroupStart>,
    settings: Arc<ActorSettings>,
    tools: Arc<[ToolSpec]>,
    live: Option<Live>,
    trial: Trial,
    /// Turns of the part that the policy is at.
    turns: usize,
    /// Seconds in tools at which that part began.
    part_began: f64,
    /// Whether the policy has called a tool that works in its actor.
    has_worked: bool,
    /// Whether the policy brought its actor down while an agent used it.
    is_lost: bool,
    /// What the last step ran.
    runs: Vec<ToolRun>,
    stats: EpisodeStats,
}

/// How a call goes on.
enum Called {
    /// With what the policy is told.
    Told(Message),
    /// The policy is done, as it says or because its time is over.
    Done(Option<Message>),
    /// There is no actor any more.
    Gone(Message),
}

impl ActorEnvironment {
    /// Returns the environment of one episode of `task`, which begins at `start`.
    #[must_use]
    pub fn new(task: Arc<Task>, start: Arc<GroupStart>, settings: Arc<ActorSettings>) -> Self {
        Self {
            task,
            start,
            settings,
            tools: actor_tools().into(),
            live: None,
            trial: Trial::default(),
            turns: 0,
            part_began: 0.0,
            has_worked: false,
            is_lost: false,
            runs: Vec::new(),
            stats: EpisodeStats::default(),
        }
    }

    fn fault(&self, source: ActorError) -> EnvError {
        EnvError::Actor {
            task: self.task.id.clone(),
            source,
        }
    }

    /// Returns the policy's actor, which is started where there is none; waits no longer for room once `is_over`.
    fn live(&mut self, is_over: &dyn Fn() -> bool) -> Result<&Live, ActorError> {
        let live = match self.live.take() {
            Some(live) => live,
            None => {
                let place = self.start.place();
                let started = Instant::now();
                // Before there is room: who waits for a build keeps nobody else from working.
                self.start.provide(is_over)?;
                let provided = started.elapsed();
                let slot = place.room(is_over).ok_or_else(run_ends)?;
                let started = Instant::now();
                let actor = self.start.actor()?;
                self.stats.start_seconds += (provided + started.elapsed()).as_secs_f64();
                Live { actor, slot }
            }
        };
        Ok(self.live.insert(live))
    }

    /// Returns the lines that the policy's commands begin with.
    fn setup(&self) -> Vec<String> {
        match self.start.task() {
            RepositoryTask::Swebench(instance) => instance.environment().to_vec(),
            RepositoryTask::Harbor(_) => Vec::new(),
        }
    }

    /// Returns how long the policy has left for its part; for ever where the task does not say. Time in which the
    /// model samples does not count: it depends on the machine.
    fn time_left(&self) -> Option<Duration> {
        let RepositoryTask::Harbor(task) = self.start.task() else {
            return None;
        };
        let limit = task.parts.get(self.trial.part())?.agent_timeout_sec?;
        let used = self.stats.tool_seconds - self.part_began;
        Some(Duration::try_from_secs_f64((limit - used).max(0.0)).unwrap_or(Duration::MAX))
    }

    /// Does what a call asks for, the one at `at` of its message.
    fn call(&mut self, at: usize, call: &ToolCall) -> Result<Called, EnvError> {
        let told = |text: String| Ok(Called::Told(Message::tool_result(call, text)));
        if call.name == SUBMIT {
            return Ok(Called::Done(None));
        }
        if ![BASH, EDIT].contains(&call.name.as_str()) {
            self.stats.tool_failures += 1;
            return told(format!(
                "error: there is no tool `{}`; use `{BASH}`, `{EDIT}` or `{SUBMIT}`",
                call.name
            ));
        }
        let left = self.time_left();
        if left == Some(Duration::ZERO) {
            let text = "(the time for this task is over)".to_owned();
            return Ok(Called::Done(Some(Message::tool_result(call, text))));
        }
        let limit = self.settings.command_timeout;
        let timeout = left.map_or(limit, |left| left.min(limit));
        let _span = tracing::info_span!("tool", tool = %call.name).entered();
        let (setup, max_chars) = (self.setup(), self.settings.max_output_chars);
        let result = self.live(&|| false).map(|_| ());
        result.map_err(|error| self.fault(error))?;
        self.has_worked = true;
        let user = self.start.user(self.trial.part());
        let Some(live) = &self.live else {
            return Err(self.fault(run_ends()));
        };
        let started = Instant::now();
        let ran = match call.name.as_str() {
            BASH => match call.arguments.get("command") {
                Some(Value::String(command)) => {
                    let runs = &mut self.runs;
                    bash(&*live.actor, user, &setup, command, timeout, max_chars).map(|bashed| {
                        runs.extend(bashed.run.map(|run| ToolRun {
                            call: u32::try_from(at).ok(),
                            ..run
                        }));
                        bashed.ran
                    })
                }
                _ => Ok(Ran::Told {
                    text: format!("error: `{BASH}` needs the argument `command`, a string"),
                    is_failure: true,
                    timed_out: false,
                }),
            },
            _ => edit::edit(&*live.actor, user, call).map(|edited| {
                let (text, is_failure) = match edited {
                    Ok(text) => (text, false),
                    Err(refusal) => (format!("error: {refusal}"), true),
                };
                Ran::Told {
                    text: crate::env::head_and_tail(&text, max_chars),
                    is_failure,
                    timed_out: false,
                }
            }),
        };
        self.stats.tool_seconds += started.elapsed().as_secs_f64();
        match ran {
            Ok(Ran::Told {
                text,
                is_failure,
                timed_out,
            }) => {
                self.stats.tool_failures += u32::from(is_failure);
                self.stats.commands_timed_out += u32::from(timed_out);
                told(text)
            }
            Ok(Ran::Gone { text }) => {
                self.stats.tool_failures += 1;
                Ok(Called::Gone(Message::tool_result(call, text)))
            }
            Err(error @ ActorError::Ended { .. }) => {
                self.stats.tool_failures += 1;
                let text = format!("(the sandbox was ended: {error})");
                Ok(Called::Gone(Message::tool_result(call, text)))
            }
            Err(error) => Err(self.fault(error)),
        }
    }

    fn take_turn(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        self.turns += 1;
        self.runs.clear();
        let mut observation = Vec::with_capacity(turn.tool_calls.len().max(1));
        for (at, call) in turn.tool_calls.iter().enumerate() {
            self.stats.tool_calls += 1;
            let called = match call {
                Ok(call) => {
                    let place = turn.tool_calls[..at].iter().flatten().count();
                    self.call(place, call)?
                }
                Err(error) => {
                    self.stats.tool_failures += 1;
                    Called::Told(Message::tool(format!("error: {error}")))
                }
            };
            match called {
                Called::Told(message) => observation.push(message),
                Called::Done(message) => {
                    observation.extend(message);
                    return self.end_part(observation, false);
                }
                Called::Gone(message) => {
                    observation.push(message);
                    return Ok(self.lost(observation));
                }
            }
        }
        if turn.tool_calls.is_empty() {
            observation.push(Message::user(NO_CALL));
        }
        if self.turns >= self.settings.max_turns {
            return self.end_part(observation, false);
        }
        Ok(StepResult::goes_on(observation))
    }

    /// Ends an episode whose actor the policy brought down.
    fn lost(&mut self, observation: Vec<Message>) -> StepResult {
        self.live = None;
        self.stats.actors_lost += 1;
        let why = "the policy brought its sandbox down";
        let verdict = match self.start.task() {
            RepositoryTask::Swebench(_) => Verdict::invalid(1, why, GradeUsage::default()),
            RepositoryTask::Harbor(task) => std::mem::take(&mut self.trial).lose(task, why),
        };
        ended(observation, verdict)
    }

    /// Judges the part that the policy is at, and ends the episode or goes on with the next.
    fn end_part(
        &mut self,
        observation: Vec<Message>,
        is_cut_off: bool,
    ) -> Result<StepResult, EnvError> {
        let _span = tracing::info_span!("grade").entered();
        let start = Arc::clone(&self.start);
        let began = Instant::now();
        let before = self.stats.start_seconds;
        let result = match start.task() {
            RepositoryTask::Swebench(instance) => self.judge_patch(&start, instance, observation),
            RepositoryTask::Harbor(task) => self.judge_trial(&start, task, observation, is_cut_off),
        };
        let started = self.stats.start_seconds - before;
        self.stats.grade_seconds += began.elapsed().as_secs_f64() - started;
        result.map_err(|error| {
            self.live = None;
            self.fault(error)
        })
    }

    fn judge_patch(
        &mut self,
        start: &GroupStart,
        instance: &SwebenchInstance,
        observation: Vec<Message>,
    ) -> Result<StepResult, ActorError> {
        // Who called no tool has changed nothing.
        let live = self.live.take().filter(|_| self.has_worked);
        let Some(Live { actor, slot }) = live else {
            let verdict = Verdict::invalid(1, "nothing was changed", GradeUsage::default());
            let mut result = ended(observation, verdict);
            result.status = Some(EpisodeStatus::NoSubmission);
            return Ok(result);
        };
        let base = start.base().ok_or_else(|| ActorError::InvalidSpec {
            reason: "the repository was not looked at before".to_owned(),
        })?;
        let began = Instant::now();
        let changes = base.changes(&*actor, instance.workdir())?;
        // One actor at a time: the policy's makes room for the tests'.
        actor.destroy()?;
        let verdict = match changes {
            Err(Untold { why, timed_out })
                if timed_out && !base.is_told_in_time(start, instance, began)? =>
            {
                Verdict::infra_error(1, &why, GradeUsage::default())
            }
            Err(Untold { why, .. }) => Verdict::invalid(1, &why, GradeUsage::default()),
            Ok(patch) => {
                let place = start.place();
                let grader = InstanceGrader {
                    backend: place.backend(),
                    spec: &place.spec(start.task())?,
                    instance,
                    bonus: self.settings.bonus,
                    timeout: self.settings.test_timeout,
                    controls: place.controls(),
                };
                grader.grade(&patch)?.verdict
            }
        };
        drop(slot);
        Ok(ended(observation, verdict))
    }

    fn judge_trial(
        &mut self,
        start: &GroupStart,
        task: &HarborTask,
        mut observation: Vec<Message>,
        is_cut_off: bool,
    ) -> Result<StepResult, ActorError> {
        // Harbor judges whatever is there, also where nothing was done.
        self.live(&|| false)?;
        let Some(Live { actor, slot }) = self.live.take() else {
            return Err(run_ends());
        };
        let (judged, actor) = self.trial.judge(start, task, actor, is_cut_off)?;
        match judged {
            Judged::Over(verdict) => {
                actor.map_or(Ok(()), Actor::destroy)?;
                drop(slot);
                Ok(ended(observation, verdict))
            }
            Judged::GoesOn => {
                self.live = actor.map(|actor| Live { actor, slot });
                self.turns = 0;
                self.part_began = self.stats.tool_seconds;
                let part = task.parts.get(self.trial.part());
                let next = part.map_or("", |part| part.instruction.trim());
                observation.push(Message::user(format!(
                    "This step is done. The next one:\n\n{next}"
                )));
                Ok(StepResult::goes_on(observation))
            }
        }
    }
}

/// The last step of an episode.
fn ended(observation: Vec<Message>, verdict: Verdict) -> StepResult {
    let message = verdict.tests.iter().find(|test| !test.message.is_empty());
    let fault = match verdict.status {
        VerdictStatus::InfraError => message.map(|test| test.message.clone()),
        _ => None,
    };
    StepResult {
        observation,
        reward: verdict.reward,
        rewards: verdict.rewards,
        done: true,
        status: Some(match verdict.status {
            VerdictStatus::Passed => EpisodeStatus::Passed,
            VerdictStatus::Failed => EpisodeStatus::Failed,
            VerdictStatus::Invalid => EpisodeStatus::Invalid,
            VerdictStatus::InfraError => EpisodeStatus::InfraError,
        }),
        fault,
    }
}

impl Environment for ActorEnvironment {
    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        self.live = None;
        self.trial = Trial::default();
        self.turns = 0;
        self.part_began = 0.0;
        self.has_worked = false;
        self.is_lost = false;
        self.runs.clear();
        self.stats = EpisodeStats::default();
        let system = self.settings.system_prompt.as_deref();
        Ok(vec![
            Message::system(system.unwrap_or(SYSTEM_PROMPT)),
            Message::user(self.task.instruction()),
        ])
    }

    fn waits(&self) -> bool {
        true
    }

    fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        let result = self.take_turn(turn);
        if result.is_err() {
            self.live = None;
        }
        result
    }

    fn lends_tools(&self) -> bool {
        true
    }

    fn open_tools(&mut self, is_over: &dyn Fn() -> bool) -> Result<(), EnvError> {
        let result = self.live(is_over).map(|_| ());
        result.map_err(|error| self.fault(error))
    }

    fn use_tool(&mut self, call: &ToolCall) -> Result<String, EnvError> {
        if self.is_lost {
            return Ok("error: the sandbox was ended, and nothing is left of it".to_owned());
        }
        if call.name == SUBMIT {
            return Ok("error: the task is judged when the agent ends".to_owned());
        }
        self.stats.tool_calls += 1;
        // An agent has turns of its own, which are not known here.
        self.runs.clear();
        let called = self.call(0, call).inspect_err(|_| self.is_lost = true)?;
        Ok(match called {
            Called::Told(message) | Called::Done(Some(message)) => message.content,
            Called::Done(None) => String::new(),
            Called::Gone(message) => {
                self.is_lost = true;
                message.content
            }
        })
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        if self.is_lost {
            return self.lost(Vec::new());
        }
        match self.end_part(Vec::new(), true) {
            Ok(result) => result,
            Err(error) => StepResult {
                observation: Vec::new(),
                reward: None,
                rewards: IndexMap::new(),
                done: true,
                status: Some(EpisodeStatus::InfraError),
                fault: Some(crate::causes::with_causes(&error)),
            },
        }
    }

    fn take_runs(&mut self) -> Vec<ToolRun> {
        std::mem::take(&mut self.runs)
    }

    fn stats(&self) -> EpisodeStats {
        self.stats
    }
}
