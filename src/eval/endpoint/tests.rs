use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use indexmap::IndexMap;
use serde_json::json;

use super::*;
use crate::chat::{Message, ParsedTurn, ToolSpec};
use crate::env::{EnvError, Environment, EpisodeStats, EpisodeStatus, StepResult};
use crate::eval::TaskScore;
use crate::http::tests_support::{Script, serve, whole, whole_with};
use crate::trajectory::Status;

const SEED: CollectionSeed<'_> = CollectionSeed {
    run: 7,
    purpose: "eval",
    step: 0,
    draw: 0,
};

/// Passes once `done` is called; answers everything else.
struct Door {
    tools: Vec<ToolSpec>,
}

fn ended(status: EpisodeStatus) -> StepResult {
    StepResult {
        observation: Vec::new(),
        reward: Some(f64::from(u8::from(status == EpisodeStatus::Passed))),
        rewards: IndexMap::new(),
        done: true,
        status: Some(status),
        fault: None,
    }
}

impl Environment for Door {
    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        Ok(vec![
            Message::system("Be brief."),
            Message::user("Open it."),
        ])
    }

    fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        assert_ne!(turn.content, "panic", "as the model asked");
        let mut observation = Vec::new();
        for call in &turn.tool_calls {
            match call {
                Ok(call) if call.name == "done" => return Ok(ended(EpisodeStatus::Passed)),
                Ok(call) => observation.push(Message::tool_result(call, "It is locked.")),
                Err(error) => observation.push(Message::tool(format!("error: {error}"))),
            }
        }
        if observation.is_empty() {
            observation.push(Message::user("Call a tool."));
        }
        Ok(StepResult {
            observation,
            reward: None,
            done: false,
            status: None,
            ..ended(EpisodeStatus::Passed)
        })
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        ended(EpisodeStatus::NoSubmission)
    }

    fn stats(&self) -> EpisodeStats {
        EpisodeStats::default()
    }
}

fn requests(tasks: &[&str], samples: usize) -> Vec<GroupRequest> {
    let door = || {
        let tools = vec![ToolSpec::new(
            "done",
            "Opens it.",
            json!({"type": "object"}),
        )];
        Box::new(Door { tools }) as Box<dyn Environment>
    };
    let group = |task_id: &&str| GroupRequest {
        task_id: (*task_id).to_owned(),
        visit: 0,
        first_sample: 0,
        max_new_tokens: None,
        environments: (0..samples).map(|_| door()).collect(),
    };
    tasks.iter().map(group).collect()
}

fn config(url: &str) -> EndpointConfig {
    EndpointConfig {
        upstream: UpstreamConfig {
            model: Some("m".to_owned()),
            asks_for_ids: false,
            timeout: Duration::from_secs(20),
            ..UpstreamConfig::new(url)
        },
        temperature: 1.0,
        max_new_tokens: 64,
        max_total_tokens: 1000,
        use_tools: true,
        extra: Map::new(),
        concurrency: 2,
        retries: 2,
    }
}

/// What a model says, as a whole response.
fn say(message: &Value, finish_reason: &str, prompt_tokens: u64) -> Script {
    let body = json!({
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 5},
    });
    whole("200 OK", &body.to_string())
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn calls(calls: &[Value]) -> Script {
    let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
    say(&message, "tool_calls", 10)
}

fn done() -> Script {
    calls(&[call("c", "done", "{}")])
}

fn turns_of(body: &Value) -> usize {
    let messages = body["messages"].as_array().unwrap();
    messages
        .iter()
        .filter(|message| message["role"] == "assistant")
        .count()
}

fn evaluate(
    config: &EndpointConfig,
    requests: Vec<GroupRequest>,
    results: &mut ResultsFile,
) -> Result<(), EndpointError> {
    let go_on = AtomicBool::new(false);
    evaluate_endpoint(config, requests, SEED, results, &go_on, &mut |_| {})
}

fn records(config: &EndpointConfig, requests: Vec<GroupRequest>) -> Vec<EpisodeRecord> {
    let mut results = ResultsFile::in_memory();
    evaluate(config, requests, &mut results).unwrap();
    results.into_records(|_, _| true)
}

#[test]
fn a_conversation_goes_on_as_servers_want_it() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let bodies = Arc::clone(&seen);
    let url = serve(move |body| {
        bodies.lock().unwrap().push(body.clone());
        match turns_of(body) {
            // Without an id, without JSON, without an object; with reasoning that is not sent back.
            0 => say(
                &json!({
                    "role": "assistant", "content": "Hm.", "reasoning": "A door?",
                    "tool_calls": [
                        {"function": {"name": "knock", "arguments": ""}},
                        call("b", "push", "{\"hard\": tru"),
                        call("c", "pull", "[1]"),
                    ],
                }),
                "tool_calls",
                20,
            ),
            1 => say(
                &json!({"role": "assistant", "content": "I wait."}),
                "stop",
                60,
            ),
            _ => done(),
        }
    });
    let mut config = config(&url);
    config.extra =
        json!({"top_k": 20, "seed": null, "max_tokens": null, "max_completion_tokens": 9})
            .as_object()
            .unwrap()
            .clone();
    let records = records(&config, requests(&["t"], 1));
    let bodies = seen.lock().unwrap();
    let first = &bodies[0];
    assert_eq!(
        (
            &first["model"],
            &first["stream"],
            &first["top_k"],
            &first["max_completion_tokens"]
        ),
        (&json!("m"), &json!(false), &json!(20), &json!(9))
    );
    for left_out in ["seed", "max_tokens", "return_token_ids", "logprobs"] {
        assert!(first.get(left_out).is_none(), "{left_out}");
    }
    assert_eq!(first["tools"][0]["function"]["name"], "done");
    let said = bodies[2]["messages"].as_array().unwrap();
    assert_eq!(said[0], json!({"role": "system", "content": "Be brief."}));
    assert_eq!(said[1], json!({"role": "user", "content": "Open it."}));
    assert_eq!(
        said[2],
        json!({
            "role": "assistant", "content": "Hm.",
            "tool_calls": [call("call_1_0", "knock", "{}"), call("b", "push", "{}"), call("c", "pull", "{}")],
        })
    );
    let answer =
        |id: &str, content: &str| json!({"role": "tool", "content": content, "tool_call_id": id});
    assert_eq!(said[3], answer("call_1_0", "It is locked."));
    assert_eq!(said[4]["tool_call_id"], "b");
    let told = |index: usize| said[index]["content"].as_str().unwrap().to_owned();
    assert!(told(4).contains("not valid JSON"), "{}", told(4));
    assert!(
        told(5).contains("must be a JSON object, found an array"),
        "{}",
        told(5)
    );
    // A turn without calls has no list of them, nor a null in its place.
    assert_eq!(said[6], json!({"role": "assistant", "content": "I wait."}));
    assert_eq!(said[7], json!({"role": "user", "content": "Call a tool."}));
    let [record] = &records[..] else {
        panic!("{records:?}");
    };
    assert_eq!(record.trajectory.passed, Some(true));
    assert_eq!(record.trajectory.turns.len(), 3);
    assert!(record.trajectory.trace.is_empty());
    let reasoning = record.trajectory.messages[2].reasoning_content.as_deref();
    assert_eq!(reasoning, Some("A door?"));
    let usage = EndpointUsage {
        requests: 3,
        retries: 0,
        uncounted: 0,
        prompt_tokens: 90,
        completion_tokens: 15,
    };
    assert_eq!(record.usage, usage);
}

#[test]
fn samples_have_seeds_of_their_own_and_the_same_ones_again() {
    let seeds = || {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let bodies = Arc::clone(&seen);
        let url = serve(move |body| {
            bodies.lock().unwrap().push(body["seed"].as_u64().unwrap());
            done()
        });
        records(&config(&url), requests(&["t", "u"], 3));
        let mut seeds = seen.lock().unwrap().clone();
        seeds.sort_unstable();
        seeds
    };
    let mut first = seeds();
    assert_eq!(first, seeds());
    assert!(first.iter().all(|seed| *seed < 1 << 31));
    first.dedup();
    assert_eq!(first.len(), 6);
}

#[test]
fn what_fails_for_a_while_is_asked_again() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let url = serve(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        0 => whole_with(
            "429 Too Many",
            "Retry-After: 1\r\n",
            r#"{"error": "later"}"#,
        ),
        // Breaks off.
        1 => vec![(
            0,
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{".to_owned(),
        )],
        _ => done(),
    });
    let started = Instant::now();
    let records = records(&config(&url), requests(&["t"], 1));
    assert_eq!(records[0].trajectory.passed, Some(true));
    assert_eq!(
        (records[0].usage.requests, records[0].usage.retries),
        (1, 2)
    );
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    assert!(
        started.elapsed() >= Duration::from_secs(1),
        "it came back too early"
    );
}

#[test]
fn what_the_endpoint_fails_for_good_has_no_score() {
    // The second request of every episode of one task fails.
    let url = serve(|body| match turns_of(body) {
        0 => calls(&[call("a", "knock", "{}")]),
        _ => whole("500 Oops", "{}"),
    });
    let mut config = config(&url);
    (config.retries, config.concurrency) = (0, 1);
    let records = records(&config, requests(&["t"], 3));
    let scores = TaskScore::count(records.iter().map(|record| &record.trajectory));
    assert_eq!((scores[0].n, scores[0].unscorable), (0, 3));
    let Status::Failed { reason } = &records[0].trajectory.status else {
        panic!("{:?}", records[0].trajectory.status);
    };
    assert!(reason.contains("status 500"), "{reason}");
}

#[test]
fn an_endpoint_that_is_down_ends_it() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let url = serve(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        whole("503 Down", "{}")
    });
    let mut config = config(&url);
    config.retries = 0;
    let mut results = ResultsFile::in_memory();
    let error = evaluate(&config, requests(&["t"], 100), &mut results).unwrap_err();
    assert!(
        matches!(error, EndpointError::Down { failures: 4, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("status 503"), "{error}");
    // Not all hundred were tried.
    assert!(asked.load(Ordering::Relaxed) < 10);
}

#[test]
fn what_no_episode_can_get_past_ends_it_and_says_what_helps() {
    for (status, remedy) in [
        ("401 Unauthorized", "--api-key-env"),
        ("404 Not Found", "the name of the model"),
        ("400 Bad", "--no-tools"),
        ("308 Elsewhere", "check the address"),
    ] {
        let url = serve(move |_| whole(status, r#"{"error": {"message": "no such thing"}}"#));
        let mut results = ResultsFile::in_memory();
        let error = evaluate(&config(&url), requests(&["t"], 20), &mut results).unwrap_err();
        assert!(error.is_usage());
        assert!(error.to_string().contains(remedy), "{status}: {error}");
        assert!(results.into_records(|_, _| true).is_empty());
    }
}

#[test]
fn a_context_that_is_full_ends_an_episode_and_is_the_models_doing() {
    // The server refuses the second turn.
    let url = serve(|body| match turns_of(body) {
        0 => calls(&[call("a", "knock", "{}")]),
        _ => whole(
            "400 Bad Request",
            r#"{"error": {"message": "This model's maximum context length is 64 tokens."}}"#,
        ),
    });
    let full = records(&config(&url), requests(&["t"], 1));
    // Our own limit is met.
    let url = serve(|_| say(&json!({"role": "assistant", "content": "..."}), "stop", 995));
    let limited = records(&config(&url), requests(&["t"], 1));
    // An answer is too long.
    let url = serve(|_| {
        say(
            &json!({"role": "assistant", "content": "..."}),
            "length",
            10,
        )
    });
    let cut_off = records(&config(&url), requests(&["t"], 1));
    for records in [full, limited, cut_off] {
        let episode = &records[0].trajectory;
        assert_eq!((episode.passed, episode.reward), (Some(false), Some(0.0)));
        assert_eq!(episode.status, Status::Truncated);
    }
}

const TOO_LONG: &str =
    r#"{"error": {"message": "Too many tokens.", "code": "context_length_exceeded"}}"#;

/// Whoever is asked first, and however many there are in a row.
#[test]
fn tasks_that_are_too_long_are_the_models_failures_and_end_nothing() {
    let url = serve(|body| match body["messages"][0]["content"].as_str() {
        Some(content) if content.starts_with("long") => whole("400 Bad Request", TOO_LONG),
        _ => done(),
    });
    let mut config = config(&url);
    config.concurrency = 1;
    let mut asked = requests(&["t"], 1);
    let long = (0..6).map(|_| Box::new(Long) as Box<dyn Environment>);
    asked.insert(
        0,
        GroupRequest {
            task_id: "long".to_owned(),
            visit: 0,
            first_sample: 0,
            max_new_tokens: None,
            environments: long.collect(),
        },
    );
    let records = records(&config, asked);
    let (long, short) = records.split_at(6);
    for record in long {
        let episode = &record.trajectory;
        assert_eq!(
            (episode.passed, &episode.status),
            (Some(false), &Status::Truncated)
        );
        assert_eq!(record.usage, EndpointUsage::default());
    }
    assert_eq!(short[0].trajectory.passed, Some(true));
}

/// Says more than the model reads.
struct Long;

impl Environment for Long {
    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        Ok(vec![Message::user("long ".repeat(100))])
    }

    fn tools(&self) -> &[ToolSpec] {
        &[]
    }

    fn step(&mut self, _turn: &ParsedTurn) -> Result<StepResult, EnvError> {
        unreachable!("no turn comes of it")
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        ended(EpisodeStatus::NoSubmission)
    }

    fn stats(&self) -> EpisodeStats {
        EpisodeStats::default()
    }
}

#[test]
fn a_turn_is_given_what_is_left_of_the_episodes_tokens() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let bodies = Arc::clone(&seen);
    let url = serve(move |body| {
        let mut seen = bodies.lock().unwrap();
        seen.push(body["max_tokens"].as_u64().unwrap());
        let prompt = [100, 960, 995][seen.len() - 1];
        say(
            &json!({"role": "assistant", "content": "Hm."}),
            "stop",
            prompt,
        )
    });
    let mut only = config(&url);
    only.max_new_tokens = 900;
    let once = records(&only, requests(&["t"], 1));
    // 105 of 1000 tokens were used after the first turn, 965 after the second, all after the third.
    assert_eq!(*seen.lock().unwrap(), [900, 895, 35]);
    assert_eq!(once[0].trajectory.turns.len(), 3);

    // What is over the limit at once was not sampled within it: its answer counts as cut off or not at all.
    for (prompt, turns) in [(998, 1), (1000, 0)] {
        let url = serve(move |_| {
            let calls = [call("c", "done", "{}")];
            let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
            say(&message, "tool_calls", prompt)
        });
        let records = records(&config(&url), requests(&["t"], 1));
        let episode = &records[0].trajectory;
        assert_eq!(
            (episode.passed, &episode.status),
            (Some(false), &Status::Truncated)
        );
        assert_eq!(episode.turns.len(), turns);
        assert_eq!(records[0].usage.prompt_tokens, prompt);
    }
}

#[test]
fn answers_without_counts_are_told_from_answers_of_no_tokens() {
    let url = serve(|body| match turns_of(body) {
        0 => calls(&[call("a", "knock", "{}")]),
        _ => {
            let calls = [call("c", "done", "{}")];
            let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
            let choice = json!({"index": 0, "message": message, "finish_reason": "tool_calls"});
            whole("200 OK", &json!({"choices": [choice]}).to_string())
        }
    });
    let records = records(&config(&url), requests(&["t"], 1));
    let usage = EndpointUsage {
        requests: 2,
        retries: 0,
        uncounted: 1,
        prompt_tokens: 10,
        completion_tokens: 5,
    };
    assert_eq!(records[0].usage, usage);
}

/// What was paid for is told, whatever came of it.
#[test]
fn costs_are_those_of_all_that_was_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.jsonl");
    let asked = Map::new();
    let costs = |results: &ResultsFile| (results.usage().requests, results.usage().prompt_tokens);
    // The endpoint fails after a turn, then the key is revoked after one.
    for (status, before, after) in [("500 Oops", 0, 1), ("401 Unauthorized", 1, 2)] {
        let url = serve(move |body| match turns_of(body) {
            0 => calls(&[call("a", "knock", "{}")]),
            _ => whole(status, "{}"),
        });
        let mut config = config(&url);
        config.retries = 0;
        let mut results = ResultsFile::open(&path, &asked).unwrap();
        assert_eq!(costs(&results), (before, before * 10));
        let outcome = evaluate(&config, requests(&["t"], 1), &mut results);
        assert_eq!(outcome.is_err(), status.starts_with("401"), "{outcome:?}");
        assert_eq!(costs(&results), (after, after * 10));
    }
    // It is asked to stop between two turns.
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let url = serve(move |_| {
        stopping.store(true, Ordering::Relaxed);
        calls(&[call("a", "knock", "{}")])
    });
    let mut results = ResultsFile::open(&path, &asked).unwrap();
    let outcome = evaluate_endpoint(
        &config(&url),
        requests(&["t"], 1),
        SEED,
        &mut results,
        &stop,
        &mut |_| {},
    );
    assert!(
        matches!(outcome, Err(EndpointError::Stopped { done: 0, total: 1 })),
        "{outcome:?}"
    );
    drop(results);
    // It ends well.
    let mut results = ResultsFile::open(&path, &asked).unwrap();
    assert_eq!(costs(&results), (3, 30));
    let url = serve(|_| done());
    evaluate(&config(&url), requests(&["t"], 1), &mut results).unwrap();
    drop(results);
    let results = ResultsFile::open(&path, &asked).unwrap();
    assert_eq!(costs(&results), (4, 40));
    let records = results.into_records(|_, _| true);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].trajectory.passed, Some(true));
}

/// An environment of a server that does not answer; the evaluation is asked to stop meanwhile.
struct Silent {
    stop: Arc<AtomicBool>,
}

impl Environment for Silent {
    fn is_prepared(&mut self) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        false
    }

    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        unreachable!("it would wait for the server")
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

#[test]
fn who_is_to_stop_does_not_wait_for_a_server_that_does_not_answer() {
    let url = serve(|_| done());
    let stop = Arc::new(AtomicBool::new(false));
    let mut asked = requests(&["t"], 1);
    let silent = Silent {
        stop: Arc::clone(&stop),
    };
    asked[0].environments = vec![Box::new(silent)];
    let mut results = ResultsFile::in_memory();
    let outcome = evaluate_endpoint(&config(&url), asked, SEED, &mut results, &stop, &mut |_| {});
    assert!(
        matches!(outcome, Err(EndpointError::Stopped { done: 0, total: 1 })),
        "{outcome:?}"
    );
}

/// A file goes on with fewer tasks and samples than it holds.
#[test]
fn only_what_is_asked_for_is_reported() {
    let url = serve(|_| done());
    let mut results = ResultsFile::in_memory();
    evaluate(&config(&url), requests(&["t", "u", "v"], 2), &mut results).unwrap();
    let records = results.into_records(|task_id, sample| task_id != "v" && sample < 1);
    let mut found: Vec<_> = records
        .iter()
        .map(|record| (record.trajectory.task_id.as_str(), record.trajectory.sample))
        .collect();
    found.sort_unstable();
    assert_eq!(found, [("t", 0), ("u", 0)]);
}

#[test]
fn an_environment_that_panics_fails_one_episode() {
    let url = serve(|body| match body["seed"].as_u64().unwrap() % 2 {
        0 => say(
            &json!({"role": "assistant", "content": "panic"}),
            "stop",
            10,
        ),
        _ => done(),
    });
    let records = records(&config(&url), requests(&["t"], 16));
    let failed = records
        .iter()
        .filter(|record| record.trajectory.passed.is_none());
    let failed = failed.count();
    assert!(0 < failed && failed < 16, "{failed}");
}

#[test]
fn an_evaluation_that_was_interrupted_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/results.jsonl");
    let asked = json!({"model": "m", "temperature": 1.0})
        .as_object()
        .unwrap()
        .clone();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let url = serve(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        done()
    });
    let config = config(&url);
    let mut results = ResultsFile::open(&path, &asked).unwrap();
    evaluate(&config, requests(&["t"], 3), &mut results).unwrap();
    // What could not be scored is tried again.
    let mut failed = results.into_records(|_, _| true)[0].clone();
    failed.trajectory.task_id = "u".to_owned();
    failed.trajectory.sample = 0;
    failed.trajectory.passed = None;
    let mut results = ResultsFile::open(&path, &asked).unwrap();
    results.append(failed).unwrap();
    drop(results);
    // A line that was not written to its end.
    let text = fs_err::read_to_string(&path).unwrap();
    let last = text.lines().next_back().unwrap();
    fs_err::write(&path, format!("{text}{}", &last[..last.len() / 2])).unwrap();

    let mut results = ResultsFile::open(&path, &asked).unwrap();
    evaluate(&config, requests(&["t", "u"], 3), &mut results).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 3 + 3);
    let records = results.into_records(|_, _| true);
    let scores = TaskScore::count(records.iter().map(|record| &record.trajectory));
    let counts: Vec<_> = scores
        .iter()
        .map(|score| (score.n, score.c, score.unscorable))
        .collect();
    assert_eq!(counts, [(3, 3, 0), (3, 3, 0)]);
    let again = ResultsFile::open(&path, &asked)
        .unwrap()
        .into_records(|_, _| true);
    assert_eq!(again.len(), 6);

    let mut other = asked;
    other["temperature"] = json!(0.5);
    let error = ResultsFile::open(&path, &other).unwrap_err().to_string();
    assert!(
        error.contains("another `temperature` (1.0, now 0.5)"),
        "{error}"
    );
}

/// What one task's messages are refused for ends that task alone, also in the first request after a pause.
#[test]
fn an_endpoint_that_has_answered_before_takes_the_requests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.jsonl");
    let asked = Map::new();
    let mut results = ResultsFile::open(&path, &asked).unwrap();
    let url = serve(|_| done());
    evaluate(&config(&url), requests(&["t"], 1), &mut results).unwrap();
    drop(results);
    let mut results = ResultsFile::open(&path, &asked).unwrap();
    let url = serve(|_| {
        whole(
            "400 Bad",
            r#"{"error": {"message": "a word that I do not like"}}"#,
        )
    });
    evaluate(&config(&url), requests(&["t", "u"], 1), &mut results).unwrap();
    let records = results.into_records(|_, _| true);
    assert_eq!(records[1].trajectory.passed, None);
}

/// A server that asks for no pause is not hammered.
#[test]
fn a_pause_is_never_shorter_than_ours() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let url = serve(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        0 | 1 => whole_with("503 Busy", "Retry-After: 0\r\n", "{}"),
        _ => done(),
    });
    let started = Instant::now();
    let records = records(&config(&url), requests(&["t"], 1));
    assert_eq!(records[0].usage.retries, 2);
    // At least half of 0.5 s and of 1 s.
    assert!(started.elapsed() >= Duration::from_millis(750));
}

#[test]
fn a_file_of_something_else_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let asked = json!({"model": "m"}).as_object().unwrap().clone();
    let path = folder.path().join("other.json");
    for text in [
        "[1]\n",
        "{\"task\": 1}",
        "{\"model\": \"m\"",
        "{\n}\n",
        "{\"model\":\"m\"}\n[]\n",
    ] {
        fs_err::write(&path, text).unwrap();
        let error = ResultsFile::open(&path, &asked).unwrap_err();
        assert!(error.is_usage(), "{error}");
        assert_eq!(fs_err::read_to_string(&path).unwrap(), text);
    }
    // The first line of ours, cut off.
    let path = folder.path().join("ours.jsonl");
    fs_err::write(&path, "{\"model\":\"").unwrap();
    ResultsFile::open(&path, &asked).unwrap();
    assert_eq!(
        fs_err::read_to_string(&path).unwrap(),
        "{\"model\":\"m\"}\n"
    );
}

#[test]
fn a_request_to_stop_is_met_within_a_pause() {
    let url = serve(|_| whole_with("503 Down", "Retry-After: 60\r\n", "{}"));
    let stop = Arc::new(AtomicBool::new(false));
    let later = Arc::clone(&stop);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        later.store(true, Ordering::Relaxed);
    });
    let started = Instant::now();
    let mut results = ResultsFile::in_memory();
    let requests = requests(&["t"], 2);
    let error = evaluate_endpoint(
        &config(&url),
        requests,
        SEED,
        &mut results,
        &stop,
        &mut |_| {},
    );
    assert!(
        matches!(error, Err(EndpointError::Stopped { done: 0, total: 2 })),
        "{error:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn the_only_model_needs_no_name() {
    let models = |names: &[&str]| {
        let models: Vec<_> = names.iter().map(|name| json!({"id": name})).collect();
        let body = json!({"data": models}).to_string();
        serve(move |_| whole("200 OK", &body))
    };
    let found = |url: &str| only_model(UpstreamConfig::new(url));
    assert_eq!(found(&models(&["m"])).unwrap(), "m");
    let error = found(&models(&["m", "n"])).unwrap_err().to_string();
    assert!(error.contains("the models m, n; name one"), "{error}");
    let error = found(&models(&[])).unwrap_err().to_string();
    assert!(error.contains("no models"), "{error}");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", nobody.local_addr().unwrap());
    drop(nobody);
    let error = found(&url).unwrap_err().to_string();
    assert!(error.contains("it cannot be reached"), "{error}");
    assert!(!error.contains("upstream"), "{error}");
}

/// What the model does not say, and what it calls by no name, is its own failure and no fault of the endpoint.
#[test]
fn a_turn_that_servers_would_refuse_to_read_is_sent_as_they_read_it() {
    let url = serve(|body| {
        let messages = body["messages"].as_array().unwrap();
        let is_readable = |message: &Value| {
            let calls = message["tool_calls"].as_array();
            let mut names = calls
                .into_iter()
                .flatten()
                .map(|call| call["function"]["name"].as_str().unwrap());
            let possible = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            (message["content"].is_string() || calls.is_some())
                && names.all(|name| (1..=64).contains(&name.len()) && name.chars().all(possible))
        };
        match turns_of(body) {
            _ if !messages.iter().all(is_readable) => whole("400 Bad", "{}"),
            0 => say(&json!({"role": "assistant", "content": null}), "stop", 10),
            1 => calls(&[call("a", "no such.tool!", "{}"), call("b", "", "{}")]),
            2 => calls(&[call("c", &"x".repeat(100), "{}")]),
            _ => done(),
        }
    });
    let records = records(&config(&url), requests(&["t"], 1));
    assert_eq!(records[0].trajectory.passed, Some(true), "{records:?}");
    assert_eq!(records[0].usage.requests, 4);
}

#[test]
fn sums_of_counts_stay_sums() {
    let most = EndpointUsage {
        requests: u64::MAX,
        retries: u64::MAX,
        uncounted: u64::MAX,
        prompt_tokens: u64::MAX,
        completion_tokens: u64::MAX,
    };
    let mut sum = most;
    sum.add(most);
    sum.count(Some((1, 1)));
    assert_eq!(sum, most);
}
