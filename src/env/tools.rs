//! Program tasks with tools: run drafts, then submit.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::text::{describe, last_code_block};
use super::{EnvError, Environment, EpisodeStats, EpisodeStatus, StepResult};
use crate::chat::{Message, ParsedTurn, ToolCall, ToolSpec};
use crate::grader::{GradeRequest, Grader, TestStatus, Verdict, VerdictStatus};
use crate::sandbox::{ExecOutcome, ExecRequest, Exit, Limits, Sandbox};
use crate::task::Task;

const RUN_PYTHON: &str = "run_python";
const SUBMIT_SOLUTION: &str = "submit_solution";

/// Settings of [`ToolEnvironment`].
#[derive(Debug, Clone)]
pub struct ToolEnvironmentConfig {
    /// Opening system message; `None` leaves it to the chat template.
    pub system_prompt: Option<String>,
    /// Assistant turns before the episode ends.
    pub max_turns: usize,
    /// Characters of tool output shown to the model; the middle is cut.
    pub max_output_chars: usize,
    /// Limits of each `run_python` program.
    pub limits: Limits,
    /// What a submission earns.
    pub reward: RewardWeights,
}

/// What a submission earns: a weighted sum of its parts, each from 0 to 1.
///
/// By default it is 1 where every test passes and 0 elsewhere. The other parts help a policy that
/// hardly ever passes to find a direction; they also reward what is not yet right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RewardWeights {
    /// Every test passes.
    pub passed: f64,
    /// The share of tests that pass.
    pub test_fraction: f64,
    /// The submission loads and defines what the tests use.
    pub loads: f64,
}

impl Default for RewardWeights {
    fn default() -> Self {
        Self {
            passed: 1.0,
            test_fraction: 0.0,
            loads: 0.0,
        }
    }
}

impl RewardWeights {
    /// Returns the parts of a verdict's reward and their weighted sum.
    fn score(self, verdict: &Verdict) -> (Vec<(&'static str, f64)>, f64) {
        let share = |holds: bool| f64::from(u8::from(holds));
        let passed = share(verdict.status == VerdictStatus::Passed);
        let loads = share(matches!(
            verdict.status,
            VerdictStatus::Passed | VerdictStatus::Failed
        ));
        let count = verdict.tests.len().max(1) as f64;
        let tests = verdict
            .tests
            .iter()
            .filter(|test| test.status == TestStatus::Passed)
            .count();
        let fraction = tests as f64 / count;
        let parts = vec![
            ("passed", passed),
            ("test_fraction", fraction),
            ("loads", loads),
        ];
        (
            parts,
            self.passed * passed + self.test_fraction * fraction + self.loads * loads,
        )
    }
}

/// One episode of one program task.
///
/// The model calls `run_python(code)` as often as its turns allow and ends with
/// `submit_solution(code)`. A model that does not call tools may answer with a fenced Python
/// block instead: the block is run against the visible tests, what happened comes back as a user
/// message, and the block is submitted once they pass or the turns are over.
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
        let tools = Arc::from(Self::tool_specs());
        Self {
            task,
            sandbox,
            grader,
            config,
            tools,
            seed,
            turns: 0,
            answer: None,
            stats: EpisodeStats::default(),
        }
    }

    /// Returns the two tools as the model sees them.
    #[must_use]
    pub fn tool_specs() -> Vec<ToolSpec> {
        let code = |description: &str| {
            json!({
                "type": "object",
                "properties": {"code": {"type": "string", "description": description}},
                "required": ["code"],
            })
        };
        vec![
            ToolSpec::new(
                RUN_PYTHON,
                "Runs a Python program in a sandbox and returns what it prints.",
                code("The program."),
            ),
            ToolSpec::new(
                SUBMIT_SOLUTION,
                "Submits the final code for grading and ends the task.",
                code("The complete solution."),
            ),
        ]
    }

    fn run(&mut self, code: &str) -> Result<ExecOutcome, EnvError> {
        let request = ExecRequest {
            code: code.to_owned(),
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
        if let Exit::DeadlineExceeded { .. } = outcome.exit {
            return Err(EnvError::Deadline {
                task: self.task.id.clone(),
                exit: outcome.exit,
            });
        }
        Ok(outcome)
    }

    fn submit(&mut self, code: &str) -> StepResult {
        let started = Instant::now();
        let verdict = self.grader.grade(&grade_request(&self.task, code));
        self.stats.grade_seconds += started.elapsed().as_secs_f64();
        self.stats.fuel += verdict.usage.candidate.fuel;
        finished(&verdict, self.config.reward)
    }

    fn without_submission() -> StepResult {
        StepResult {
            observation: Vec::new(),
            reward: Some(0.0),
            rewards: Vec::new(),
            done: true,
            status: Some(EpisodeStatus::NoSubmission),
            fault: None,
        }
    }

    /// Answers a turn that called no tool.
    fn answer_text(&mut self, content: &str) -> Result<StepResult, EnvError> {
        let Some(code) = last_code_block(content) else {
            return Ok(continued(vec![Message::user(
                "There is no code in your answer. Reply with one Python code block.",
            )]));
        };
        if self.turns >= self.config.max_turns {
            return Ok(self.submit(&code));
        }
        let program = format!(
            "{code}\n\n{}\n{}\n",
            self.task.setup.join("\n"),
            self.task.visible().join("\n")
        );
        let outcome = self.run(&program)?;
        if outcome.exit.is_success() {
            return Ok(self.submit(&code));
        }
        self.answer = Some(code);
        let output = describe(&outcome, self.config.max_output_chars);
        Ok(continued(vec![Message::user(format!(
            "Running your code with the visible tests gave:\n{output}\nReply with a corrected \
             Python code block."
        ))]))
    }
}

/// Returns what the grader is asked about a submission to `task`.
#[must_use]
pub fn grade_request(task: &Task, code: &str) -> GradeRequest {
    GradeRequest {
        code: code.to_owned(),
        setup: task.setup.clone(),
        tests: task.tests.clone(),
        entry_points: task.entry_points.clone(),
    }
}

fn continued(observation: Vec<Message>) -> StepResult {
    StepResult {
        observation,
        reward: None,
        rewards: Vec::new(),
        done: false,
        status: None,
        fault: None,
    }
}

fn finished(verdict: &Verdict, weights: RewardWeights) -> StepResult {
    let status = match verdict.status {
        VerdictStatus::Passed => EpisodeStatus::Passed,
        VerdictStatus::Failed => EpisodeStatus::Failed,
        VerdictStatus::Invalid => EpisodeStatus::Invalid,
        VerdictStatus::InfraError => EpisodeStatus::InfraError,
    };
    let fault = verdict
        .reward
        .is_none()
        .then(|| verdict.tests.first().map(|test| test.message.clone()))
        .flatten();
    // What we failed to grade has no reward, not a reward of 0.
    let (rewards, reward) = match verdict.reward {
        Some(_) => {
            let (parts, reward) = weights.score(verdict);
            (parts, Some(reward))
        }
        None => (Vec::new(), None),
    };
    StepResult {
        observation: Vec::new(),
        reward,
        rewards,
        done: true,
        status: Some(status),
        fault,
    }
}

/// Returns the `code` argument, or what to tell the model.
fn code_argument(call: &ToolCall) -> Result<&str, String> {
    match call.arguments.get("code") {
        Some(Value::String(code)) => Ok(code),
        Some(_) => Err(format!(
            "error: argument `code` of `{}` must be a string",
            call.name
        )),
        None => Err(format!("error: `{}` needs the argument `code`", call.name)),
    }
}

impl Environment for ToolEnvironment {
    fn reset(&mut self) -> Vec<Message> {
        self.turns = 0;
        self.answer = None;
        self.stats = EpisodeStats::default();
        let mut messages = Vec::with_capacity(2);
        if let Some(prompt) = &self.config.system_prompt {
            messages.push(Message::system(prompt.clone()));
        }
        messages.push(Message::user(self.task.instruction()));
        messages
    }

    fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        self.turns += 1;
        let mut result = if turn.tool_calls.is_empty() {
            self.answer_text(&turn.content)?
        } else {
            let mut observation = Vec::with_capacity(turn.tool_calls.len());
            for call in &turn.tool_calls {
                self.stats.tool_calls += 1;
                let checked = match call {
                    Ok(call) if call.name == RUN_PYTHON || call.name == SUBMIT_SOLUTION => {
                        code_argument(call).map(|code| (call, code))
                    }
                    Ok(call) => Err(format!(
                        "error: there is no tool `{}`; use `{RUN_PYTHON}` or `{SUBMIT_SOLUTION}`",
                        call.name
                    )),
                    Err(error) => Err(format!("error: {error}")),
                };
                match checked {
                    Ok((call, code)) if call.name == SUBMIT_SOLUTION => {
                        return Ok(self.submit(code));
                    }
                    Ok((call, code)) => {
                        let outcome = self.run(code)?;
                        self.stats.tool_failures += u32::from(!outcome.exit.is_success());
                        let output = describe(&outcome, self.config.max_output_chars);
                        observation.push(Message::tool_result(call, output));
                    }
                    Err(reason) => {
                        self.stats.tool_failures += 1;
                        observation.push(Message::tool(reason));
                    }
                }
            }
            continued(observation)
        };
        if !result.done && self.turns >= self.config.max_turns {
            result = self.close(None);
        }
        Ok(result)
    }

    fn close(&mut self, cut_off: Option<&ParsedTurn>) -> StepResult {
        // A program given to `run_python` is a draft: the model must say which code it stands by.
        let answer = cut_off
            .filter(|turn| turn.tool_calls.is_empty())
            .and_then(|turn| last_code_block(&turn.content))
            .or_else(|| self.answer.take());
        match answer {
            Some(code) => self.submit(&code),
            None => Self::without_submission(),
        }
    }

    fn stats(&self) -> EpisodeStats {
        self.stats
    }
}
