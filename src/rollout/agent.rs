//! The tool loop of one episode.

use std::panic::{AssertUnwindSafe, catch_unwind};

use indexmap::IndexMap;
use tracing::Span;
use tracing::field::Empty;

use super::RolloutError;
use crate::causes::with_causes;
use crate::chat::{Message, ParsedTurn, ToolCall, ToolCallFormat, parse_turn_as};
use crate::engine::{EngineError, FinishReason};
use crate::env::{Environment, EpisodeStats, EpisodeStatus, StepResult};
use crate::trajectory::{
    Finish, Segment, Status, TokenTrace, ToolRun, TraceError, Trajectory, Turn, Usage,
};

/// The most bytes of what programs printed that are kept of an episode, besides what the policy was told.
const MAX_KEPT: usize = 512 << 10;

/// A turn as the engine sampled it.
#[derive(Debug, Clone)]
pub(super) struct SampledTurn {
    /// The turn's ids, the stop token included.
    pub(super) tokens: Vec<u32>,
    /// The log-probability of each.
    pub(super) logprobs: Vec<f32>,
    /// Whether each was sampled; the others close reasoning that was too long.
    pub(super) is_sampled: Vec<bool>,
    /// The text, without the stop token.
    pub(super) text: String,
    /// How tool calls are written in it.
    pub(super) format: ToolCallFormat,
    /// Why sampling ended.
    pub(super) finish: FinishReason,
    /// Seconds since the turn was asked for.
    pub(super) seconds: f64,
}

/// Returns the text of tokens.
pub(super) type Decode<'a> = dyn Fn(&[u32]) -> Result<String, EngineError> + 'a;

/// One episode: an environment, the conversation so far and its token trace.
///
/// It knows nothing of batches: the collector hands it sampled turns and appends what it answers.
pub struct Episode {
    environment: Box<dyn Environment>,
    trajectory: Trajectory,
    /// From its reset to its end, within what the thread is at: the run. What is logged on its behalf says so, on
    /// whatever thread.
    span: Span,
}

/// Returns a number as OpenTelemetry has numbers: with a sign.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Returns the span of an episode. It is there at every level.
fn span_of(trajectory: &Trajectory) -> Span {
    let Trajectory {
        task_id,
        group,
        sample,
        policy_step,
        ..
    } = trajectory;
    tracing::error_span!(
        "rollout",
        rollout = format_args!("{policy_step}-{group}-{sample}"),
        step = signed(*policy_step),
        task = %task_id,
        group = signed(*group),
        sample,
        reward = Empty,
        status = Empty,
    )
}

impl std::fmt::Debug for Episode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Episode")
            .field("task", &self.trajectory.task_id)
            .field("sample", &self.trajectory.sample)
            .finish_non_exhaustive()
    }
}

impl Episode {
    /// Resets the environment and returns the episode before its first turn. Where the environment cannot
    /// be reset, the episode [has failed](Self::has_failed) before it began.
    pub fn start(
        environment: Box<dyn Environment>,
        task_id: &str,
        group: u64,
        sample: u32,
        policy_step: u64,
    ) -> Self {
        let trajectory = Trajectory {
            task_id: task_id.to_owned(),
            group,
            sample,
            policy_step,
            segments: Vec::new(),
            messages: Vec::new(),
            turns: Vec::new(),
            trace: TokenTrace::new(),
            reward: None,
            rewards: IndexMap::new(),
            passed: None,
            status: Status::Finished,
            usage: Usage::default(),
        };
        let mut episode = Self {
            span: span_of(&trajectory),
            environment,
            trajectory,
        };
        episode.guard(|episode| {
            match episode.environment.reset() {
                Ok(messages) => episode.trajectory.messages = messages,
                Err(error) => episode.fail(&error),
            }
            None
        });
        episode
    }

    /// Returns whether the episode has failed, by no fault of the policy: there is nothing to go on with.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self.trajectory.status, Status::Failed { .. })
    }

    pub(super) fn task_id(&self) -> &str {
        &self.trajectory.task_id
    }

    /// Returns what the policy acts on.
    #[must_use]
    pub fn environment(&self) -> &dyn Environment {
        &*self.environment
    }

    /// Returns the conversation so far.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.trajectory.messages
    }

    pub(super) fn trace_mut(&mut self) -> &mut TokenTrace {
        &mut self.trajectory.trace
    }

    /// Returns the span of the turn that is sampled next.
    pub(super) fn turn_span(&self) -> Span {
        // OpenTelemetry's integers have a sign.
        let turn = i64::try_from(self.trajectory.turns.len()).unwrap_or(i64::MAX);
        tracing::info_span!(parent: &self.span, "turn", turn, tokens = Empty)
    }

    pub(super) fn trajectory(&self) -> &Trajectory {
        &self.trajectory
    }

    /// Notes that the policy of `policy_step` samples what begins at `start` of the trace.
    pub(super) fn go_on(&mut self, start: usize, policy_step: u64) {
        let trajectory = &mut self.trajectory;
        let last = trajectory.segments.last();
        let last = last.map_or(trajectory.policy_step, |segment| segment.policy_step);
        if last != policy_step {
            trajectory.segments.push(Segment { start, policy_step });
        }
    }

    /// Returns an episode that was saved between two turns or within one, with `environment` brought to
    /// where it was. Where the environment fails, or does not answer as it did, the episode
    /// [has failed](Self::has_failed).
    pub(super) fn replay(
        environment: Box<dyn Environment>,
        trajectory: Trajectory,
        decode: &Decode<'_>,
        format: ToolCallFormat,
    ) -> Self {
        let mut episode = Self {
            span: span_of(&trajectory),
            environment,
            trajectory,
        };
        episode.guard(|episode| {
            if let Err(error) = episode.answer_again(decode, format) {
                episode.fail(&error);
            }
            None
        });
        episode
    }

    /// Lets the environment answer all turns again.
    fn answer_again(
        &mut self,
        decode: &Decode<'_>,
        format: ToolCallFormat,
    ) -> Result<(), RolloutError> {
        let trajectory = &self.trajectory;
        let task = || trajectory.task_id.clone();
        let differs = || RolloutError::Replay { task: task() };
        let lost = |source| RolloutError::Restore {
            task: task(),
            source,
        };
        let mut said = self.environment.reset().map_err(lost)?;
        let mut place = 0;
        for turn in &trajectory.turns {
            if trajectory.messages.get(place..turn.message) != Some(&said[..]) {
                return Err(differs());
            }
            let ids = &trajectory.trace.ids()[turn.tokens.clone()];
            // Without the token that ended the turn: one that was cut off would have ended the episode.
            let text = decode(&ids[..ids.len().saturating_sub(1)])?;
            let parsed = parse_turn_as(&text, format, self.environment.tools());
            let result = self.environment.step(&parsed).map_err(lost)?;
            // They are stored already.
            self.environment.take_runs();
            if result.done {
                return Err(differs());
            }
            (said, place) = (result.observation, turn.message + 1);
        }
        if trajectory.messages.get(place..) != Some(&said[..]) {
            return Err(differs());
        }
        Ok(())
    }

    /// Takes a sampled turn and returns the messages that answer it, or `None` at the end.
    pub(super) fn take_turn(&mut self, sampled: &SampledTurn) -> Option<Vec<Message>> {
        self.guard(|episode| episode.take_sampled(sampled))
    }

    /// Does something with the environment. A panic of it would end the process, or the collection; here it
    /// ends one episode.
    fn guard(
        &mut self,
        act: impl FnOnce(&mut Self) -> Option<Vec<Message>>,
    ) -> Option<Vec<Message>> {
        let span = self.span.clone();
        let _entered = span.enter();
        catch_unwind(AssertUnwindSafe(|| act(self))).unwrap_or_else(|_| {
            self.fail(&std::io::Error::other("the environment panicked"));
            None
        })
    }

    fn take_sampled(&mut self, sampled: &SampledTurn) -> Option<Vec<Message>> {
        let start = self.trajectory.trace.len();
        if let Err(error) = self.record(sampled) {
            self.fail(&error);
            return None;
        }
        self.trajectory.usage.generate_seconds += sampled.seconds;
        let parsed = parse_turn_as(&sampled.text, sampled.format, self.environment.tools());
        self.act(&parsed, sampled.finish == FinishReason::Length, start)
    }

    /// Takes a turn whose ids are not known, as of a model elsewhere, which took `seconds` to come, and
    /// returns the messages that answer it, or `None` at the end.
    pub fn take_untraced_turn(
        &mut self,
        turn: &ParsedTurn,
        is_cut_off: bool,
        seconds: f64,
    ) -> Option<Vec<Message>> {
        self.trajectory.usage.generate_seconds += seconds;
        let start = self.trajectory.trace.len();
        self.guard(|episode| episode.act(turn, is_cut_off, start))
    }

    /// Lets the environment answer a turn, whose ids begin at `start`.
    fn act(&mut self, parsed: &ParsedTurn, is_cut_off: bool, start: usize) -> Option<Vec<Message>> {
        let before = self.environment.stats();
        self.trajectory.messages.push(Message {
            reasoning_content: parsed.reasoning.clone(),
            tool_calls: parsed.tool_calls.iter().flatten().cloned().collect(),
            ..Message::assistant(parsed.content.clone())
        });
        let outcome = if is_cut_off {
            Ok(self.environment.close(Some(parsed)))
        } else {
            self.environment.step(parsed)
        };
        let after = self.environment.stats();
        let runs = self.take_runs();
        self.trajectory.turns.push(Turn {
            message: self.trajectory.messages.len() - 1,
            tokens: start..self.trajectory.trace.len(),
            finish: if is_cut_off {
                Finish::Length
            } else {
                Finish::Stop
            },
            tool_calls: after.tool_calls - before.tool_calls,
            tool_failures: after.tool_failures - before.tool_failures,
            runs,
        });
        self.use_stats(after);
        match outcome {
            Ok(result) => self.take_result(result, is_cut_off),
            Err(error) => {
                self.fail(&error);
                None
            }
        }
    }

    /// Returns what the step ran, as much of it as there is room for.
    fn take_runs(&mut self) -> Vec<ToolRun> {
        let stored = self.trajectory.turns.iter().flat_map(|turn| &turn.runs);
        let mut kept: usize = stored.map(ToolRun::kept).sum();
        let mut runs = self.environment.take_runs();
        for run in &mut runs {
            if kept + run.kept() > MAX_KEPT {
                run.drop_text();
            }
            kept += run.kept();
        }
        runs
    }

    /// Adds a turn's tokens to the trace: what was sampled, and between it what was not.
    fn record(&mut self, sampled: &SampledTurn) -> Result<(), TraceError> {
        let trace = &mut self.trajectory.trace;
        let mut start = 0;
        for run in sampled.is_sampled.chunk_by(|left, right| left == right) {
            let span = start..start + run.len();
            start = span.end;
            if run[0] {
                trace.push_sampled(&sampled.tokens[span.clone()], &sampled.logprobs[span])?;
            } else {
                trace.push_observation(&sampled.tokens[span]);
            }
        }
        Ok(())
    }

    /// Whether an agent that is a program of its own can use the environment's tools.
    pub(super) fn lends_tools(&self) -> bool {
        self.environment.lends_tools()
    }

    /// Gets what the tools work with before an agent that is a program of its own begins, as
    /// [`Environment::open_tools`].
    pub(super) fn open_tools(&mut self, is_over: &dyn Fn() -> bool) {
        let span = self.span.clone();
        let _entered = span.enter();
        let opened = catch_unwind(AssertUnwindSafe(|| self.environment.open_tools(is_over)));
        match opened {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.fail(&error),
            Err(_) => self.fail(&std::io::Error::other("the environment panicked")),
        }
    }

    /// Uses a tool for an agent that is a program of its own; returns what it is told, or nothing where the
    /// environment has failed.
    pub(super) fn use_tool(&mut self, call: &ToolCall) -> Option<String> {
        if self.has_failed() {
            return None;
        }
        let span = self.span.clone();
        let _entered = span.enter();
        let used = catch_unwind(AssertUnwindSafe(|| self.environment.use_tool(call)));
        let result = match used {
            Ok(Ok(told)) => return Some(told),
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(()),
        };
        match result {
            Err(error) => self.fail(&error),
            Ok(()) => self.fail(&std::io::Error::other("the environment panicked")),
        }
        None
    }

    /// Ends an episode whose context is full.
    pub fn close(&mut self) {
        self.guard(|episode| {
            let result = episode.environment.close(None);
            episode.use_stats(episode.environment.stats());
            episode.take_result(result, true)
        });
    }

    /// Ends an episode that was played elsewhere, with its answer if it gave one.
    pub(super) fn end(&mut self, answer: Option<&str>) {
        self.guard(|episode| {
            let result = match answer {
                Some(answer) => episode.environment.submit(answer),
                None => episode.environment.close(None),
            };
            episode.use_stats(episode.environment.stats());
            episode.take_result(result, false)
        });
    }

    /// Marks the episode as failed by us: it has no reward.
    pub fn fail(&mut self, error: &dyn std::error::Error) {
        let reason = with_causes(error);
        self.span
            .in_scope(|| tracing::warn!(error = %reason, "an episode failed"));
        self.trajectory.reward = None;
        self.trajectory.passed = None;
        self.trajectory.status = Status::Failed { reason };
    }

    /// Returns what happened.
    #[must_use]
    pub fn into_trajectory(self) -> Trajectory {
        if let Some(reward) = self.trajectory.reward {
            self.span.record("reward", reward);
        }
        self.span.record("status", self.trajectory.status.name());
        self.trajectory
    }

    fn take_result(&mut self, result: StepResult, is_cut_off: bool) -> Option<Vec<Message>> {
        self.trajectory
            .messages
            .extend(result.observation.iter().cloned());
        if !result.done {
            return Some(result.observation);
        }
        self.trajectory.reward = result.reward;
        self.trajectory.rewards = result.rewards;
        let (passed, status) = match result.status {
            Some(EpisodeStatus::Passed) => (Some(true), Status::Finished),
            Some(EpisodeStatus::Failed | EpisodeStatus::Invalid) => (Some(false), Status::Finished),
            Some(EpisodeStatus::NoSubmission) | None => (Some(false), Status::TurnLimit),
            Some(EpisodeStatus::InfraError) => (
                None,
                Status::Failed {
                    reason: result
                        .fault
                        .unwrap_or_else(|| "the grader failed".to_owned()),
                },
            ),
        };
        self.trajectory.passed = passed;
        self.trajectory.status = match status {
            Status::Finished | Status::TurnLimit if is_cut_off => Status::Truncated,
            status => status,
        };
        None
    }

    fn use_stats(&mut self, stats: EpisodeStats) {
        let usage = &mut self.trajectory.usage;
        usage.start_seconds = stats.start_seconds;
        usage.commands_timed_out = stats.commands_timed_out;
        usage.actors_lost = stats.actors_lost;
        usage.tool_seconds = stats.tool_seconds;
        usage.grade_seconds = stats.grade_seconds;
        usage.fuel = stats.fuel;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ToolSpec;
    use crate::env::EnvError;
    use crate::trajectory::{KeptText, RunEnding};

    /// Repeats what it was told until it is told nothing.
    struct Echo;

    impl Environment for Echo {
        fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
            Ok(vec![Message::user("say it")])
        }

        fn tools(&self) -> &[ToolSpec] {
            &[]
        }

        fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
            let said = turn.tool_calls.iter().map(|call| match call {
                Ok(call) => call.name.clone(),
                Err(error) => error.to_string(),
            });
            Ok(StepResult::goes_on(said.map(Message::tool).collect()))
        }

        fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
            unreachable!("no turn of these tests is cut off")
        }

        fn stats(&self) -> EpisodeStats {
            EpisodeStats::default()
        }
    }

    /// Cannot be reset.
    struct Broken {
        panics: bool,
    }

    impl Environment for Broken {
        fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
            assert!(!self.panics, "as it is told to");
            Err(EnvError::Remote {
                source: "it is not there".into(),
            })
        }

        fn tools(&self) -> &[ToolSpec] {
            &[]
        }

        fn step(&mut self, _turn: &ParsedTurn) -> Result<StepResult, EnvError> {
            unreachable!("it was not reset")
        }

        fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
            unreachable!("it was not reset")
        }

        fn stats(&self) -> EpisodeStats {
            EpisodeStats::default()
        }
    }

    fn take(format: ToolCallFormat, text: &str, is_sampled: &[bool]) -> (Episode, Vec<Message>) {
        let mut episode = Episode::start(Box::new(Echo), "task", 0, 0, 0);
        let count = u32::try_from(is_sampled.len()).unwrap();
        let logprobs = is_sampled
            .iter()
            .map(|&sampled| if sampled { -0.5 } else { 0.0 });
        let messages = episode.take_turn(&SampledTurn {
            tokens: (10..10 + count).collect(),
            logprobs: logprobs.collect(),
            is_sampled: is_sampled.to_vec(),
            text: text.to_owned(),
            format,
            finish: FinishReason::Stop,
            seconds: 0.0,
        });
        (episode, messages.unwrap())
    }

    /// Runs a program that prints a lot in each turn.
    struct Loud;

    impl Environment for Loud {
        fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
            Ok(vec![Message::user("print")])
        }

        fn tools(&self) -> &[ToolSpec] {
            &[]
        }

        fn step(&mut self, _turn: &ParsedTurn) -> Result<StepResult, EnvError> {
            Ok(StepResult::goes_on(vec![Message::tool("a lot")]))
        }

        fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
            unreachable!("no turn is cut off")
        }

        fn take_runs(&mut self) -> Vec<ToolRun> {
            vec![ToolRun {
                call: Some(0),
                ending: RunEnding::Exited { code: 0 },
                stdout: KeptText::of(&[b'x'; 16 << 10]),
                stderr: KeptText::default(),
                fuel: Some(1),
            }]
        }

        fn stats(&self) -> EpisodeStats {
            EpisodeStats::default()
        }
    }

    #[test]
    fn what_programs_print_is_kept_up_to_a_limit_and_its_amount_beyond() {
        let mut episode = Episode::start(Box::new(Loud), "task", 0, 0, 0);
        for _ in 0..40 {
            episode.take_untraced_turn(&ParsedTurn::default(), false, 0.0);
        }
        let turns = episode.into_trajectory().turns;
        let runs: Vec<&ToolRun> = turns.iter().flat_map(|turn| &turn.runs).collect();
        assert_eq!(runs.len(), 40);
        let kept: usize = runs.iter().map(|run| run.kept()).sum();
        assert_eq!(kept, MAX_KEPT);
        assert_eq!(runs[39].stdout.left_out, 16 << 10);
        assert_eq!(runs[39].fuel, Some(1));
    }

    #[test]
    fn tokens_that_closed_the_reasoning_are_not_learned_from() {
        let is_sampled = [true, true, false, false, true];
        let (mut episode, _) = take(ToolCallFormat::Hermes, "", &is_sampled);
        let trace = episode.trace_mut();
        assert_eq!(trace.ids(), [10, 11, 12, 13, 14]);
        assert_eq!(trace.loss_mask(), [1, 1, 0, 0, 1]);
        assert_eq!(trace.logprobs(), [-0.5, -0.5, 0.0, 0.0, -0.5]);
        assert_eq!(episode.into_trajectory().turns[0].tokens, 0..5);
    }

    #[test]
    fn an_episode_that_cannot_begin_has_failed_and_says_why() {
        let started = |environment: Box<dyn Environment>| {
            let episode = Episode::start(environment, "task", 0, 0, 0);
            assert!(episode.has_failed());
            let trajectory = episode.into_trajectory();
            assert_eq!((trajectory.reward, trajectory.passed), (None, None));
            assert!(!trajectory.is_trainable());
            let Status::Failed { reason } = trajectory.status else {
                unreachable!("it has failed");
            };
            reason
        };
        let gone = started(Box::new(Broken { panics: false }));
        assert_eq!(gone, "it is not there");
        let panicked = started(Box::new(Broken { panics: true }));
        assert_eq!(panicked, "the environment panicked");
        assert!(!Episode::start(Box::new(Echo), "task", 0, 0, 0).has_failed());
    }

    #[test]
    fn calls_are_read_in_the_models_format_and_damaged_ones_are_answered() {
        let xml =
            "<tool_call><function=f></function></tool_call><tool_call><function=g</tool_call>";
        let (_, messages) = take(ToolCallFormat::QwenXml, xml, &[true]);
        assert_eq!(messages[0], Message::tool("f"));
        assert!(
            messages[1].content.contains("must be `<function=NAME>`"),
            "{messages:?}"
        );
        let llama = r#"{"name": "f", "parameters": {}}"#;
        assert_eq!(
            take(ToolCallFormat::Llama3, llama, &[true]).1,
            [Message::tool("f")]
        );
        assert_eq!(take(ToolCallFormat::Hermes, llama, &[true]).1, []);
    }

    fn decode(ids: &[u32]) -> Result<String, EngineError> {
        let call = |id| format!(r#"<tool_call>{{"name": "f{id}", "arguments": {{}}}}</tool_call>"#);
        Ok(ids.iter().map(call).collect())
    }

    /// An episode of two turns, each a call and the token that ends it.
    fn two_turns() -> Trajectory {
        let mut episode = Episode::start(Box::new(Echo), "task", 0, 0, 3);
        for id in [7, 8] {
            let said = episode.take_turn(&SampledTurn {
                tokens: vec![id, 2],
                logprobs: vec![-0.5; 2],
                is_sampled: vec![true; 2],
                text: decode(&[id]).unwrap(),
                format: ToolCallFormat::Hermes,
                finish: FinishReason::Stop,
                seconds: 0.0,
            });
            assert_eq!(said.unwrap(), [Message::tool(format!("f{id}"))]);
            episode.trace_mut().push_observation(&[9]);
        }
        episode.into_trajectory()
    }

    #[test]
    fn a_saved_episode_goes_on_where_its_environment_says_the_same_again() {
        let saved = two_turns();
        let replay = |saved: Trajectory| {
            Episode::replay(Box::new(Echo), saved, &decode, ToolCallFormat::Hermes)
        };
        let mut episode = replay(saved.clone());
        assert_eq!(episode.trajectory(), &saved);
        // Later policies are noted once each.
        let length = saved.trace.len();
        episode.go_on(length, 3);
        episode.go_on(length, 4);
        episode.go_on(length + 5, 4);
        let segment = Segment {
            start: length,
            policy_step: 4,
        };
        assert_eq!(episode.into_trajectory().segments, [segment]);

        // Another answer, an opening of another kind, one message too many: ours to answer for.
        let tampered = |change: &dyn Fn(&mut Vec<Message>)| {
            let mut saved = saved.clone();
            change(&mut saved.messages);
            saved
        };
        for saved in [
            tampered(&|messages| messages[2] = Message::tool("f9")),
            tampered(&|messages| messages[0] = Message::user("say nothing")),
            tampered(&|messages| messages.push(Message::tool("f9"))),
        ] {
            let failed = replay(saved).into_trajectory();
            assert_eq!((failed.reward, failed.passed), (None, None));
            let Status::Failed { reason } = failed.status else {
                unreachable!("it has failed");
            };
            assert!(reason.contains("does not answer as it did"), "{reason}");
        }
    }

    /// An environment that is not there is another fault than one that has changed.
    #[test]
    fn a_saved_episode_whose_environment_fails_says_why() {
        for (panics, expected) in [
            (
                false,
                "the environment of task `task` could not be brought back to where it was before the run \
                 was resumed: it is not there",
            ),
            (true, "the environment panicked"),
        ] {
            let broken = Box::new(Broken { panics });
            let failed = Episode::replay(broken, two_turns(), &decode, ToolCallFormat::Hermes);
            assert!(failed.has_failed());
            let Status::Failed { reason } = failed.into_trajectory().status else {
                unreachable!("it has failed");
            };
            assert_eq!(reason, expected);
        }
    }
}
