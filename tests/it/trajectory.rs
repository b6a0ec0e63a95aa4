//! Rollout files: round trips, unfinished files and damaged rows.

use std::path::Path;

use indexmap::IndexMap;
use proptest::prelude::*;
use wardian::chat::{Message, ToolCall};
use wardian::trajectory::{
    Finish, Status, StepWriter, TokenTrace, Trajectory, Turn, Usage, read_step, step_path, steps,
};

fn status() -> impl Strategy<Value = Status> {
    prop_oneof![
        Just(Status::Finished),
        Just(Status::Truncated),
        Just(Status::TurnLimit),
        ".{0,12}".prop_map(|reason| Status::Failed { reason }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        ".{0,20}".prop_map(Message::user),
        ".{0,20}".prop_map(Message::tool),
        (".{0,20}", "[a-z]{1,8}", ".{0,20}").prop_map(|(text, name, code)| {
            let mut message = Message::assistant(text);
            message
                .tool_calls
                .push(ToolCall::new(name, serde_json::json!({ "code": code })));
            message
        }),
    ]
}

prop_compose! {
    fn trajectory()(
        task_id in "[a-z0-9-]{1,8}",
        numbers in (any::<u64>(), any::<u32>(), any::<u64>()),
        messages in proptest::collection::vec(message(), 0..4),
        prompt in proptest::collection::vec(any::<u32>(), 0..6),
        sampled in proptest::collection::vec((any::<u32>(), -40.0_f32..=0.0), 0..6),
        observed in proptest::collection::vec(any::<u32>(), 0..6),
        reward in proptest::option::of(-1e9_f64..1e9),
        parts in proptest::collection::vec(("[a-z]{1,6}", -1.0_f64..1.0), 0..3),
        passed in proptest::option::of(any::<bool>()),
        status in status(),
        cut in any::<bool>(),
        usage in (0.0_f64..1e4, 0.0_f64..1e4, 0.0_f64..1e4, any::<u64>()),
    ) -> Trajectory {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&prompt).expect("the prompt comes first");
        let (ids, logprobs): (Vec<u32>, Vec<f32>) = sampled.into_iter().unzip();
        trace.push_sampled(&ids, &logprobs).expect("the strategy gives log-probabilities");
        trace.push_observation(&observed);
        let turn = Turn {
            message: messages.len(),
            tokens: prompt.len()..prompt.len() + ids.len(),
            finish: if cut { Finish::Length } else { Finish::Stop },
            tool_calls: 2,
            tool_failures: 1,
            runs: Vec::new(),
        };
        Trajectory {
            task_id,
            group: numbers.0,
            sample: numbers.1,
            policy_step: numbers.2,
            segments: Vec::new(),
            messages,
            turns: vec![turn],
            trace,
            reward,
            rewards: parts.into_iter().collect::<IndexMap<_, _>>(),
            passed,
            status,
            usage: Usage {
                generate_seconds: usage.0,
                tool_seconds: usage.1,
                grade_seconds: usage.2,
                fuel: usage.3,
                ..Usage::default()
            },
        }
    }
}

fn example() -> Trajectory {
    let mut trace = TokenTrace::new();
    trace.push_prompt(&[1, 2]).expect("the prompt comes first");
    trace
        .push_sampled(&[3], &[-0.25])
        .expect("-0.25 is a log-probability");
    Trajectory {
        task_id: "602".to_owned(),
        group: 4,
        sample: 1,
        policy_step: 9,
        segments: Vec::new(),
        messages: vec![
            Message::user("Double it."),
            Message::assistant("def f(x): ..."),
        ],
        turns: vec![Turn {
            message: 1,
            tokens: 2..3,
            finish: Finish::Stop,
            tool_calls: 0,
            tool_failures: 0,
            runs: Vec::new(),
        }],
        trace,
        reward: Some(1.0),
        rewards: IndexMap::new(),
        passed: Some(true),
        status: Status::Finished,
        usage: Usage::default(),
    }
}

fn write(run: &Path, step: u64, trajectories: &[Trajectory]) -> std::path::PathBuf {
    let mut writer = StepWriter::create(run, step).expect("the run folder is writable");
    for trajectory in trajectories {
        writer.append(trajectory).expect("the file is writable");
    }
    writer.finish().expect("the file can be renamed")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn trajectories_come_back_as_they_were_written(
        trajectories in proptest::collection::vec(trajectory(), 0..4),
    ) {
        let run = tempfile::tempdir().unwrap();
        let path = write(run.path(), 3, &trajectories);
        let read: Vec<Trajectory> = read_step(&path).unwrap().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(read, trajectories);
    }
}

#[test]
fn a_row_reads_as_documented() {
    let json = serde_json::to_string(&example()).unwrap();
    assert_eq!(
        json,
        concat!(
            r#"{"task_id":"602","group":4,"sample":1,"policy_step":9,"#,
            r#""messages":[{"role":"user","content":"Double it."},{"role":"assistant","content":"def f(x): ..."}],"#,
            r#""turns":[{"message":1,"tokens":{"start":2,"end":3},"finish":"stop","tool_calls":0,"tool_failures":0}],"#,
            r#""trace":{"prompt_len":2,"ids":[1,2,3],"logprobs":[0.0,0.0,-0.25],"loss_mask":[0,0,1]},"#,
            r#""reward":1.0,"passed":true,"status":{"kind":"finished"},"#,
            r#""usage":{"generate_seconds":0.0,"tool_seconds":0.0,"grade_seconds":0.0,"fuel":0}}"#,
        )
    );
}

#[test]
fn a_file_has_its_name_only_when_it_is_finished() {
    let run = tempfile::tempdir().unwrap();
    assert_eq!(steps(run.path()).unwrap(), Vec::<u64>::new());
    let mut writer = StepWriter::create(run.path(), 12).unwrap();
    writer.append(&example()).unwrap();
    drop(writer);
    assert_eq!(steps(run.path()).unwrap(), Vec::<u64>::new());
    assert!(!step_path(run.path(), 12).exists());
    for step in [12, 2] {
        write(run.path(), step, &[example()]);
    }
    assert_eq!(steps(run.path()).unwrap(), [2, 12]);
    let left: Vec<_> = fs_err::read_dir(run.path().join("rollouts"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".partial"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn a_damaged_row_is_named_and_ends_the_reading() {
    let run = tempfile::tempdir().unwrap();
    let path = write(run.path(), 1, &[example(), example(), example()]);
    let text = fs_err::read_to_string(&path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let cut = &lines[1][..lines[1].len() - 9];
    lines[1] = cut;
    fs_err::write(&path, lines.join("\n")).unwrap();
    let mut rows = read_step(&path).unwrap();
    rows.next().unwrap().unwrap();
    let error = rows.next().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("step-1.jsonl` row 2 is not a trajectory"),
        "{error}"
    );
    assert!(rows.next().is_none());

    let broken = text
        .replacen(r#""loss_mask":[0,0,1]"#, r#""loss_mask":[0,1,1]"#, 1)
        .replacen("[0.0,0.0,-0.25]", "[0.0,-0.5,-0.25]", 1);
    fs_err::write(&path, broken).unwrap();
    let mut rows = read_step(&path).unwrap();
    let error = rows.next().unwrap().unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(
        source.contains("the prompt ends at 2 but reaches token 1"),
        "{source}"
    );
    read_step(&run.path().join("gone.jsonl")).unwrap_err();
}
