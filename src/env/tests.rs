//! The tool loop against a scripted sandbox and grader.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::chat::{Role, parse_turn};
use crate::grader::{
    GradeRequest, GradeUsage, Grader, RewardTerms, TestResult, TestStatus, Verdict, VerdictStatus,
};
use crate::sandbox::{
    Cancel, Dialogue, DialogueOutcome, ExecOutcome, ExecRequest, Exit, Limits, Sandbox,
    SandboxError, Session, Usage as SandboxUsage,
};
use crate::task::Task;
use crate::trajectory::RunEnding;

/// Programs that hold `boom` fail; the rest print their own length.
#[derive(Debug, Default)]
struct ScriptedSandbox {
    programs: Mutex<Vec<String>>,
}

impl Sandbox for ScriptedSandbox {
    fn exec_cancellable(
        &self,
        request: &ExecRequest,
        _: &Limits,
        _: &Cancel,
    ) -> Result<ExecOutcome, SandboxError> {
        self.programs.lock().unwrap().push(request.code.clone());
        let fails = request.code.contains("boom");
        Ok(ExecOutcome {
            exit: Exit::Exited {
                code: u32::from(fails),
            },
            stdout: Vec::new(),
            stderr: if fails {
                b"NameError: boom".to_vec()
            } else {
                Vec::new()
            },
            stdout_truncated: false,
            stderr_truncated: false,
            usage: SandboxUsage {
                fuel: 10,
                memory_bytes: 0,
                wall: Duration::ZERO,
            },
        })
    }

    fn session(&self, _: &Limits) -> Result<Session, SandboxError> {
        unreachable!("no tool keeps a session")
    }

    fn converse(&self, _: &Dialogue) -> Result<DialogueOutcome, SandboxError> {
        unreachable!("the grader is scripted, too")
    }
}

/// Passes submissions that hold `right`, and fails itself on `infra`.
#[derive(Debug)]
struct ScriptedGrader;

impl Grader for ScriptedGrader {
    fn grade(&self, request: &GradeRequest) -> Verdict {
        let (reward, status) = match &request.code {
            code if code.contains("infra") => (None, VerdictStatus::InfraError),
            code if code.contains("right") => (Some(1.0), VerdictStatus::Passed),
            _ => (Some(0.0), VerdictStatus::Failed),
        };
        let results = [
            status == VerdictStatus::Passed,
            !request.code.contains("wrong"),
        ];
        let tests = results.map(|passed| {
            let status = if passed {
                TestStatus::Passed
            } else {
                TestStatus::Failed
            };
            TestResult::new("test", status, "")
        });
        Verdict {
            reward,
            rewards: IndexMap::new(),
            status,
            tests: tests.into(),
            usage: GradeUsage::default(),
        }
    }
}

fn environment(max_turns: usize) -> (ToolEnvironment, Arc<ScriptedSandbox>) {
    let task = Task {
        id: "1".to_owned(),
        prompt: "Write f.".to_owned(),
        entry_points: vec!["f".to_owned()],
        setup: vec!["import math".to_owned()],
        tests: vec!["assert f(1) == 2".to_owned(), "assert f(2) == 3".to_owned()],
        visible_tests: 1,
        ..Task::default()
    };
    environment_of(task, max_turns)
}

fn environment_of(task: Task, max_turns: usize) -> (ToolEnvironment, Arc<ScriptedSandbox>) {
    let config = ToolEnvironmentConfig {
        system_prompt: Some("Be brief.".to_owned()),
        offers_tools: true,
        max_turns,
        max_output_chars: 100,
        limits: Limits::default(),
        reward: RewardTerms {
            test_fraction: 0.5,
            loads: 0.1,
            ..RewardTerms::default()
        },
        grade_fuel: 1000,
    };
    let sandbox = Arc::new(ScriptedSandbox::default());
    let shared: Arc<dyn Sandbox> = sandbox.clone();
    let environment = ToolEnvironment::new(
        Arc::new(task),
        shared,
        Arc::new(ScriptedGrader),
        Arc::new(config),
        7,
    );
    (environment, sandbox)
}

fn call(name: &str, code: &str) -> ParsedTurn {
    ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new(name, json!({"code": code})))],
        ..Default::default()
    }
}

#[test]
fn only_visible_tests_reach_the_policy() {
    let (mut environment, _) = environment(3);
    let messages = environment.reset().unwrap();
    let text: String = messages
        .iter()
        .map(|message| message.content.as_str())
        .collect();
    assert!(text.contains("f(1) == 2"), "{text}");
    assert!(!text.contains("f(2)"), "{text}");
    assert_eq!(messages[0].role, Role::System);
}

#[test]
fn a_draft_is_run_and_a_submission_is_graded() {
    let (mut environment, sandbox) = environment(3);
    environment.reset().unwrap();
    let draft = environment.step(&call("run_python", "boom")).unwrap();
    assert!(!draft.done);
    assert_eq!(draft.observation[0].role, Role::Tool);
    assert_eq!(draft.observation[0].content, "NameError: boom");
    let end = environment.step(&call("submit_solution", "right")).unwrap();
    assert!(end.done);
    assert_eq!(
        (end.reward, end.status),
        (Some(1.6), Some(EpisodeStatus::Passed))
    );
    // The submission is the grader's: the sandbox saw the draft alone.
    assert_eq!(*sandbox.programs.lock().unwrap(), ["boom"]);
    let stats = environment.stats();
    assert_eq!(
        (stats.tool_calls, stats.tool_failures, stats.fuel),
        (2, 1, 10)
    );
}

#[test]
fn what_a_step_ran_is_told_once_and_of_which_call() {
    let (mut environment, _) = environment(3);
    environment.reset().unwrap();
    let mut turn = call("rm_rf", "x");
    turn.tool_calls
        .extend(call("run_python", "boom").tool_calls);
    environment.step(&turn).unwrap();
    let runs = environment.take_runs();
    let [run] = &runs[..] else {
        unreachable!("one program was run: {runs:?}");
    };
    assert_eq!(run.call, Some(1));
    assert_eq!(run.ending, RunEnding::Exited { code: 1 });
    assert_eq!(run.stderr.head, "NameError: boom");
    assert!(run.stdout.head.is_empty() && run.fuel.is_some());
    assert!(environment.take_runs().is_empty());
    // Who does not ask holds those of one step alone.
    environment.step(&call("run_python", "boom")).unwrap();
    environment.step(&call("submit_solution", "right")).unwrap();
    assert!(environment.take_runs().is_empty(), "a grade is no run");
}

#[test]
fn parts_of_a_reward_add_up_by_weight() {
    for (code, reward) in [("right", 1.6), ("half", 0.35), ("wrong", 0.1)] {
        let (mut environment, _) = environment(2);
        environment.reset().unwrap();
        let end = environment.step(&call("submit_solution", code)).unwrap();
        assert_eq!(end.reward, Some(reward), "{code}");
    }
}

#[test]
fn the_parts_of_a_reward_are_kept_and_say_whether_the_form_was() {
    for (mistake, format) in [(false, 1.0), (true, 0.0)] {
        let (mut environment, _) = environment(3);
        environment.reset().unwrap();
        if mistake {
            environment.step(&call("rm_rf", "x")).unwrap();
        }
        let end = environment.step(&call("submit_solution", "half")).unwrap();
        let parts: Vec<_> = end.rewards.into_iter().collect();
        let expected = [
            ("passed", 0.0),
            ("test_fraction", 0.5),
            ("loads", 1.0),
            ("format", format),
        ];
        assert_eq!(parts, expected.map(|(name, part)| (name.to_owned(), part)));
    }
    let (mut environment, _) = environment(1);
    environment.reset().unwrap();
    let end = environment.step(&call("run_python", "x")).unwrap();
    assert_eq!(end.rewards["format"], 0.0);
}

#[test]
fn a_task_may_say_what_a_submission_earns() {
    let task = Task {
        reward: Some(RewardTerms {
            passed: 3.0,
            ..RewardTerms::default()
        }),
        tests: vec!["assert f(1) == 2".to_owned()],
        ..Task::default()
    };
    let (mut environment, _) = environment_of(task, 1);
    environment.reset().unwrap();
    let end = environment.step(&call("submit_solution", "right")).unwrap();
    assert_eq!(end.reward, Some(3.0));
}

#[test]
fn a_task_that_asks_for_a_text_takes_the_turn_or_the_answer() {
    let task = Task {
        prompt: "6 * 7?".to_owned(),
        grader: "numeric".to_owned(),
        ..Task::default()
    };
    let (mut environment, sandbox) = environment_of(task.clone(), 3);
    let opening = environment.reset().unwrap();
    assert!(opening[1].content.contains("`####`"), "{opening:?}");
    let wrong_tool = environment.step(&call("submit_solution", "right")).unwrap();
    assert!(
        wrong_tool.observation[0]
            .content
            .contains("`submit_answer`")
    );
    let answer = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new(
            "submit_answer",
            json!({"answer": "right"}),
        ))],
        ..Default::default()
    };
    let end = environment.step(&answer).unwrap();
    assert_eq!((end.done, end.status), (true, Some(EpisodeStatus::Passed)));
    let (mut environment, _) = environment_of(task, 3);
    environment.reset().unwrap();
    let end = environment.step(&parse_turn("It is right.")).unwrap();
    assert_eq!((end.done, end.status), (true, Some(EpisodeStatus::Passed)));
    assert!(sandbox.programs.lock().unwrap().is_empty());
}

#[test]
fn mistakes_in_calls_come_back_as_tool_messages() {
    let (mut environment, _) = environment(9);
    environment.reset().unwrap();
    for (turn, expected) in [
        (call("rm_rf", "x"), "there is no tool `rm_rf`"),
        (
            parse_turn("<tool_call>\n{\"name\": \"run_python\", \"argu"),
            "cut off",
        ),
        (
            parse_turn("<tool_call>\n{\"name\": \"run_python\", \"arguments\": {}}\n</tool_call>"),
            "needs the argument `code`",
        ),
    ] {
        let result = environment.step(&turn).unwrap();
        assert!(!result.done);
        assert!(
            result.observation[0].content.contains(expected),
            "{:?}",
            result.observation
        );
    }
    assert_eq!(environment.stats().tool_failures, 3);
}

#[test]
fn turns_that_run_out_are_no_submission() {
    let (mut environment, _) = environment(2);
    environment.reset().unwrap();
    assert!(!environment.step(&call("run_python", "right")).unwrap().done);
    let end = environment.step(&call("run_python", "right")).unwrap();
    assert!(end.done);
    assert_eq!(
        (end.reward, end.status),
        (Some(0.0), Some(EpisodeStatus::NoSubmission))
    );
}

#[test]
fn a_grader_that_fails_leaves_no_reward() {
    let (mut environment, _) = environment(2);
    environment.reset().unwrap();
    let end = environment.step(&call("submit_solution", "infra")).unwrap();
    assert_eq!(
        (end.reward, end.status),
        (None, Some(EpisodeStatus::InfraError))
    );
}

#[test]
fn a_model_without_tools_answers_in_code_blocks() {
    let (mut environment, sandbox) = environment(3);
    environment.reset().unwrap();
    let hint = environment.step(&parse_turn("I think so.")).unwrap();
    assert_eq!(hint.observation[0].role, Role::User);
    let feedback = environment
        .step(&parse_turn("```python\nboom\n```"))
        .unwrap();
    assert!(feedback.observation[0].content.contains("NameError: boom"));
    let end = environment
        .step(&parse_turn("```python\nright\n```"))
        .unwrap();
    assert_eq!((end.reward, end.done), (Some(1.6), true));
    let programs = sandbox.programs.lock().unwrap();
    assert!(programs[0].contains("import math") && programs[0].contains("assert f(1) == 2"));
    assert!(!programs[0].contains("f(2)"));
}

#[test]
fn an_answer_in_text_that_is_cut_off_counts_as_given() {
    let (mut environment, _) = environment(5);
    environment.reset().unwrap();
    assert!(
        !environment
            .step(&parse_turn("```\nboom right\n```"))
            .unwrap()
            .done
    );
    let end = environment.close(None);
    assert_eq!((end.reward, end.done), (Some(1.6), true));
}

#[test]
fn a_whole_code_block_in_a_turn_that_is_cut_off_is_an_answer() {
    let (mut environment, _) = environment(5);
    environment.reset().unwrap();
    let cut_off = parse_turn("```python\nright\n```\nThis code uses the");
    let end = environment.close(Some(&cut_off));
    assert_eq!((end.reward, end.done), (Some(1.6), true));
}
