//! Program tasks with tools: run drafts, then submit.

use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
use serde_json::{Value, json};

use super::text::{describe_outcome, last_code_block};
use super::{EnvError, Environment, EpisodeStats, EpisodeStatus, StepResult};
use crate::chat::{Message, ParsedTurn, ToolCall, ToolSpec};
use crate::grader::{Grader, RewardTerms, Score, StdioGrader, SubmissionKind, VerdictStatus};
use crate::sandbox::{ExecOutcome, ExecRequest, Exit, Limits, Sandbox};
use crate::task::Task;
use crate::trajectory::{KeptText, RunEnding, ToolRun};

/// The tool that runs a program.
pub const RUN_PYTHON: &str = "run_python";

/// Returns the tool that runs a program, as the model sees it.
#[must_use]
pub fn run_python_tool() -> ToolSpec {
    ToolSpec::new(
        RUN_PYTHON,
        "Runs a Python program in a sandbox and returns what it prints.",
        one_text("code", "The program."),
    )
}

/// Returns the schema of arguments that are one text.
fn one_text(name: &str, description: &str) -> Value {
    let text = json!({"type": "string", "description": description});
    json!({
        "type": "object",
        "properties": {name: text},
        "required": [name],
    })
}

/// How a submission is made.
#[derive(Debug, Clone, Copy)]
struct Submit {
    /// The tool.
    tool: &'static str,
    /// Its argument.
    argument: &'static str,
}

impl Submit {
    const CODE: Self = Self {
        tool: "submit_solution",
        argument: "code",
    };
    const TEXT: Self = Self {
        tool: "submit_answer",
        argument: "answer",
    };

    fn of(kind: SubmissionKind) -> Self {
        match kind {
            SubmissionKind::Code => Self::CODE,
            SubmissionKind::Text => Self::TEXT,
        }
    }
}

/// Returns whether a call of this tool is how a model ends an episode.
#[must_use]
pub fn is_submission(tool: &str) -> bool {
    [Submit::CODE, Submit::TEXT]
        .iter()
        .any(|submit| submit.tool == tool)
}

/// Settings of [`ToolEnvironment`].
#[derive(Debug, Clone)]
pub struct ToolEnvironmentConfig {
    /// Opening system message; `None` leaves it to the chat template.
    pub system_prompt: Option<String>,
    /// Whether the policy may call tools; without, it answers in text.
    pub offers_tools: bool,
    /// Assistant turns before the episode ends.
    pub max_turns: usize,
    /// Characters of tool output shown to the model; the middle is cut.
    pub max_output_chars: usize,
    /// Limits of each `run_python` program.
    pub limits: Limits,
    /// What a submission earns, where its task does not say.
    pub reward: RewardTerms,
    /// The fuel of a submission while it is graded.
    pub grade_fuel: u64,
}

/// One episode of one task.
///
/// The model calls `run_python(code)` as often as its turns allow and ends with
/// `submit_solution(code)`. A model that does not call tools may answer with a fenced Python
/// block instead: the block is run against the visible tests, what happened comes back as a user
/// message, and the block is submitted once they pass or the turns are over.
///
/// Where the task asks for a text, as for a number, the tool is `submit_answer(answer)`, and a turn
/// without a call is the answer.
///
/// A clone goes on by itself from where the episode is.
#[derive(Clone)]
pub struct ToolEnvironment {
    task: Arc<Task>,
    sandbox: Arc<dyn Sandbox>,
    grader: Arc<dyn Grader>,
    config: Arc<ToolEnvironmentConfig>,
    tools: Arc<[ToolSpec]>,
    seed: u64,
    turns: usize,
    /// The last code block of a model that answers in text: what it stands by so far.
    answer: Option<String>,
    /// Whether every call could be read.
    is_well_formed: bool,
    /// What the last step ran.
    runs: Vec<ToolRun>,
    stats: EpisodeStats,
}

impl std::fmt::Debug for ToolEnvironment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ToolEnvironment")
            .field("task", &self.task.id)
            .field("turns", &self.turns)
            .finish_non_exhaustive()
    }
}

impl ToolEnvironment {
    /// Returns the environment of one episode; `seed` makes the programs' randomness.
    #[must_use]
    pub fn new(
        task: Arc<Task>,
        sandbox: Arc<dyn Sandbox>,
        grader: Arc<dyn Grader>,
        config: Arc<ToolEnvironmentConfig>,
        seed: u64,
    ) -> Self {
        let tools = if config.offers_tools {
            Self::tool_specs(task.submission_kind())
        } else {
            Vec::new()
        };
        Self {
            task,
            sandbox,
            grader,
            config,
            tools: Arc::from(tools),
            seed,
            turns: 0,
            answer: None,
            is_well_formed: true,
            runs: Vec::new(),
            stats: EpisodeStats::default(),
        }
    }

    /// Runs the programs of the following turns in another sandbox.
    pub fn set_sandbox(&mut self, sandbox: Arc<dyn Sandbox>) {
        self.sandbox = sandbox;
    }

    /// Returns the two tools as the model sees them.
    #[must_use]
    pub fn tool_specs(kind: SubmissionKind) -> Vec<ToolSpec> {
        let Submit { tool, argument } = Submit::of(kind);
        let submit = match kind {
            SubmissionKind::Code => ToolSpec::new(
                tool,
                "Submits the final code for grading and ends the task.",
                one_text(argument, "The complete solution."),
            ),
            SubmissionKind::Text => ToolSpec::new(
                tool,
                "Submits the final answer for grading and ends the task.",
                one_text(argument, "The answer alone."),
            ),
        };
        vec![run_python_tool(), submit]
    }

    /// Runs a program for a call of the turn, or to try an answer.
    fn run(
        &mut self,
        code: &str,
        stdin: &str,
        call: Option<usize>,
    ) -> Result<ExecOutcome, EnvError> {
        let _span = tracing::info_span!("tool", tool = RUN_PYTHON).entered();
        let request = ExecRequest {
            code: code.to_owned(),
            stdin: stdin.to_owned(),
            seed: Some(self.seed),
            ..ExecRequest::default()
        };
        let started = Instant::now();
        let outcome = self
            .sandbox
            .exec(&request, &self.config.limits)
            .map_err(|source| EnvError::Sandbox {
                task: self.task.id.clone(),
                source,
            })?;
        self.stats.tool_seconds += started.elapsed().as_secs_f64();
        self.stats.fuel += outcome.usage.fuel;
        self.runs.push(ToolRun {
            call: call.and_then(|call| u32::try_from(call).ok()),
            ..tool_run(&outcome)
        });
        if let Exit::DeadlineExceeded { .. } = outcome.exit {
            return Err(EnvError::Deadline {
                task: self.task.id.clone(),
                exit: outcome.exit,
            });
        }
        Ok(outcome)
    }

    /// Grades a submission, which ends the episode.
    fn grade(&mut self, submission: &str) -> StepResult {
        let _span = tracing::info_span!("grade").entered();
        let started = Instant::now();
        let verdict = self.grader.grade(&self.task.grade_request(submission));
        self.stats.grade_seconds += started.elapsed().as_secs_f64();
        self.stats.fuel += verdict.usage.candidate.fuel;
        let mut facts = self
            .task
            .submission_facts(submission, self.config.grade_fuel);
        facts.format = Some(self.is_well_formed);
        // What we failed to grade has no reward, not a reward of 0.
        let score = self.reward_terms().score(&verdict, &facts);
        let fault = match score {
            Some(_) => None,
            None => verdict.tests.first().map(|test| test.message.clone()),
        };
        StepResult {
            fault,
            ..ended(score, episode_status(verdict.status))
        }
    }

    fn reward_terms(&self) -> &RewardTerms {
        self.task.reward.as_ref().unwrap_or(&self.config.reward)
    }

    /// Ends an episode that has no submission.
    fn without_submission(&self) -> StepResult {
        let score = self.reward_terms().without_submission(false);
        ended(Some(score), EpisodeStatus::NoSubmission)
    }

    /// Answers a turn that called no tool.
    fn answer_text(&mut self, content: &str) -> Result<StepResult, EnvError> {
        if self.task.submission_kind() == SubmissionKind::Text {
            return Ok(self.grade(content));
        }
        let Some(code) = last_code_block(content) else {
            self.is_well_formed = false;
            return Ok(StepResult::goes_on(vec![Message::user(
                "There is no code in your answer. Reply with one Python code block.",
            )]));
        };
        if self.turns >= self.config.max_turns {
            return Ok(self.grade(&code));
        }
        let Some(outcome) = self.try_visible_tests(&code)? else {
            return Ok(self.grade(&code));
        };
        self.answer = Some(code);
        let output = describe_outcome(&outcome, self.config.max_output_chars);
        Ok(StepResult::goes_on(vec![Message::user(format!(
            "Running your code with the visible tests gave:\n{output}\nReply with a corrected \
             Python code block."
        ))]))
    }

    /// Runs a program with the visible tests, or with the first visible input; returns how it
    /// failed.
    fn try_visible_tests(&mut self, code: &str) -> Result<Option<ExecOutcome>, EnvError> {
        let task = Arc::clone(&self.task);
        let stdin = match task.visible_cases().first() {
            Some(case) if task.grader == StdioGrader::NAME => case.input.as_str(),
            _ => "",
        };
        let program = if task.visible().is_empty() {
            code.to_owned()
        } else {
            let (setup, tests) = (task.setup.join("\n"), task.visible().join("\n"));
            format!("{code}\n\n{setup}\n{tests}\n")
        };
        let outcome = self.run(&program, stdin, None)?;
        Ok((!outcome.exit.is_success()).then_some(outcome))
    }
}

/// Returns what is stored of a program that was run.
fn tool_run(outcome: &ExecOutcome) -> ToolRun {
    ToolRun {
        call: None,
        ending: match &outcome.exit {
            Exit::Exited { code } => RunEnding::Exited {
                code: i64::from(*code),
            },
            Exit::OutOfFuel { .. } => RunEnding::OutOfFuel,
            Exit::DeadlineExceeded { .. } => RunEnding::TimedOut,
            Exit::OutOfMemory { .. } => RunEnding::OutOfMemory,
            Exit::Cancelled => RunEnding::Killed {
                reason: "it was cancelled".to_owned(),
            },
            Exit::Trapped { reason } => RunEnding::Trapped {
                reason: reason.clone(),
            },
        },
        stdout: KeptText::of(&outcome.stdout),
        stderr: KeptText::of(&outcome.stderr),
        fuel: Some(outcome.usage.fuel),
    }
}

/// The last step of an episode; without a score it could not be graded.
fn ended(score: Option<Score>, status: EpisodeStatus) -> StepResult {
    let (reward, rewards) = match score {
        Some(score) => (Some(score.reward), score.parts),
        None => (None, IndexMap::new()),
    };
    StepResult {
        observation: Vec::new(),
        reward,
        rewards,
        done: true,
        status: Some(status),
        fault: None,
    }
}

fn episode_status(status: VerdictStatus) -> EpisodeStatus {
    match status {
        VerdictStatus::Passed => EpisodeStatus::Passed,
        VerdictStatus::Failed => EpisodeStatus::Failed,
        VerdictStatus::Invalid => EpisodeStatus::Invalid,
        VerdictStatus::InfraError => EpisodeStatus::InfraError,
    }
}

/// Returns a call's one argument, or what to tell the model.
fn argument<'a>(call: &'a ToolCall, name: &str) -> Result<&'a str, String> {
    match call.arguments.get(name) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!(
            "error: argument `{name}` of `{}` must be a string",
            call.name
        )),
        None => Err(format!(
            "error: `{}` needs the argument `{name}`",
            call.name
        )),
    }
}

impl Environment for ToolEnvironment {
    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        self.turns = 0;
        self.answer = None;
        self.is_well_formed = true;
        self.runs.clear();
        self.stats = EpisodeStats::default();
        let mut messages = Vec::with_capacity(2);
        if let Some(prompt) = &self.config.system_prompt {
            messages.push(Message::system(prompt.clone()));
        }
        messages.push(Message::user(self.task.instruction()));
        Ok(messages)
    }

    fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        self.turns += 1;
        self.runs.clear();
        let mut result = if turn.tool_calls.is_empty() {
            self.answer_text(&turn.content)?
        } else {
            let mut observation = Vec::with_capacity(turn.tool_calls.len());
            let submit = Submit::of(self.task.submission_kind());
            for (at, call) in turn.tool_calls.iter().enumerate() {
                self.stats.tool_calls += 1;
                let checked = match call {
                    _ if !self.config.offers_tools => {
                        Err("error: there are no tools; answer in text".to_owned())
                    }
                    Ok(call) if call.name == RUN_PYTHON => {
                        argument(call, "code").map(|code| (call, code))
                    }
                    Ok(call) if call.name == submit.tool => {
                        argument(call, submit.argument).map(|text| (call, text))
                    }
                    Ok(call) => Err(format!(
                        "error: there is no tool `{}`; use `{RUN_PYTHON}` or `{}`",
                        call.name, submit.tool
                    )),
                    Err(error) => Err(format!("error: {error}")),
                };
                match checked {
                    Ok((call, text)) if call.name == submit.tool => {
                        return Ok(self.grade(text));
                    }
                    Ok((call, code)) => {
                        let place = turn.tool_calls[..at].iter().flatten().count();
                        let outcome = self.run(code, "", Some(place))?;
                        self.stats.tool_failures += u32::from(!outcome.exit.is_success());
                        let output = describe_outcome(&outcome, self.config.max_output_chars);
                        observation.push(Message::tool_result(call, output));
                    }
                    Err(reason) => {
                        self.stats.tool_failures += 1;
                        self.is_well_formed = false;
                        observation.push(Message::tool(reason));
                    }
                }
            }
            StepResult::goes_on(observation)
        };
        if !result.done && self.turns >= self.config.max_turns {
            result = self.close(None);
        }
        Ok(result)
    }

    fn close(&mut self, cut_off: Option<&ParsedTurn>) -> StepResult {
        // A program given to `run_python` is a draft: the model must say which code it stands by.
        let is_text = self.task.submission_kind() == SubmissionKind::Text;
        let answer = cut_off
            .filter(|turn| turn.tool_calls.is_empty() && !is_text)
            .and_then(|turn| last_code_block(&turn.content))
            .or_else(|| self.answer.take());
        match answer {
            Some(code) => self.grade(&code),
            None => self.without_submission(),
        }
    }

    fn submit(&mut self, answer: &str) -> StepResult {
        self.grade(answer)
    }

    fn take_runs(&mut self) -> Vec<ToolRun> {
        std::mem::take(&mut self.runs)
    }

    fn stats(&self) -> EpisodeStats {
        self.stats
    }
}
