use std::os::unix::fs::symlink;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::chat::{ChatTemplate, ParsedTurn, ToolCallFormat, ToolSpec};
use crate::engine::Tokenizer;
use crate::env::{EnvError, EpisodeStats, EpisodeStatus, StepResult};
use crate::http::tests_support::{serve, whole};
use crate::proxy::{Upstream, UpstreamConfig};

const PATIENCE: Duration = Duration::from_secs(60);

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn run(script: &str, timeout: Duration) -> (Ended, tempfile::TempDir) {
    run_in(Isolation::None, &[], script, timeout)
}

fn run_in(
    isolation: Isolation,
    mounts: &[PathBuf],
    script: &str,
    timeout: Duration,
) -> (Ended, tempfile::TempDir) {
    let folder = folder();
    let command = ["sh", "-c", script].map(str::to_owned);
    let program = Program {
        command: &command,
        isolation,
        mounts,
        folder: folder.path(),
        timeout,
    };
    let variables = BTreeMap::from([("GIVEN".to_owned(), "1".to_owned())]);
    let ended = program.run(&variables, &AtomicBool::new(false)).unwrap();
    (ended, folder)
}

#[test]
fn a_program_has_its_own_folder_and_no_variables_of_ours() {
    // cargo sets this one for every test.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    let (ended, folder) = run(
        "pwd; echo $HOME $GIVEN ${CARGO_MANIFEST_DIR-none}; echo oh >&2; exit 3",
        PATIENCE,
    );
    let own = folder.path().canonicalize().unwrap();
    let expected = format!("{}\n{} 1 none\n", own.display(), folder.path().display());
    assert_eq!(String::from_utf8(ended.stdout.clone()).unwrap(), expected);
    assert_eq!(ended.describe(), "it exited with 3: oh");
}

#[test]
fn a_program_that_goes_on_is_ended_with_what_it_started() {
    let started = Instant::now();
    let script = "sleep 60 & echo $! > child; echo part > answer; sleep 60";
    let (ended, folder) = run(script, Duration::from_millis(500));
    assert!(ended.status.is_none());
    assert_eq!(ended.describe(), "its time was over");
    assert!(started.elapsed() < Duration::from_secs(20));
    let child = fs::read_to_string(folder.path().join("child")).unwrap();
    let status = format!("/proc/{}/stat", child.trim());
    // Whoever inherits it may not have collected it yet.
    let is_gone = fs::read_to_string(status).map_or(true, |stat| stat.contains(") Z "));
    assert!(is_gone, "what it started still runs");
    assert_eq!(
        read_answer(&folder.path().join("answer")).unwrap().unwrap(),
        "part\n"
    );
}

#[test]
fn output_without_end_is_bounded_and_its_end_is_kept() {
    let script = "head -c 5000000 /dev/zero | tr '\\0' 'x'; echo end";
    let (ended, _folder) = run(script, PATIENCE);
    assert_eq!(ended.stdout.len(), 64 << 10);
    assert!(ended.stdout.ends_with(b"xend\n"));
}

#[test]
fn an_answer_is_a_file_of_its_own() {
    let folder = folder();
    let path = folder.path().join(ANSWER);
    assert_eq!(read_answer(&path).unwrap(), None);
    // What we may read and the agent may not.
    let secret = folder.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    symlink(&secret, &path).unwrap();
    assert_eq!(read_answer(&path).unwrap(), None);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(read_answer(&path).unwrap(), None);
    fs::remove_dir(&path).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(&path)
        .status()
        .unwrap();
    assert!(made.success());
    assert_eq!(read_answer(&path).unwrap(), None);
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"caf\xe9").unwrap();
    assert_eq!(read_answer(&path).unwrap().unwrap(), "caf\u{fffd}");
}

fn config(program: &str) -> AgentConfig {
    AgentConfig {
        command: vec![program.to_owned()],
        variables: BTreeMap::new(),
        isolation: Isolation::None,
        mounts: Vec::new(),
        concurrency: 1,
        timeout: Duration::from_secs(1),
        max_model_calls: 0,
        temperature: 1.0,
        max_new_tokens: 64,
        enable_thinking: false,
    }
}

#[test]
fn a_program_that_is_not_there_is_named() {
    for there in ["sh", "/bin/sh"] {
        check_program(&config(there)).unwrap();
    }
    for missing in ["no-such-agent", "/no/such/agent", ""] {
        let error = check_program(&config(missing)).unwrap_err().to_string();
        assert!(error.contains(&format!("`{missing}`")), "{error}");
    }
}

/// Files that are not its own, other processes and the folders of other episodes are not there.
#[test]
fn a_sandbox_hides_the_rest_of_the_machine() {
    let mut config = config("sh");
    config.isolation = Isolation::Bubblewrap;
    if check_program(&config).is_err() {
        println!("skipped: there is no bubblewrap");
        return;
    }
    let (ended, _folder) = run_in(Isolation::Bubblewrap, &[], "true", PATIENCE);
    if !ended.status.is_some_and(|status| status.success()) {
        println!(
            "skipped: no namespaces are to be had here: {}",
            ended.describe()
        );
        return;
    }
    let secret = tempfile::Builder::new()
        .tempfile_in(std::env::temp_dir())
        .unwrap();
    fs::write(secret.path(), "secret").unwrap();
    let other = std::process::id();
    let script = format!(
        "pwd; cat {} 2>/dev/null; cat {}/Cargo.toml 2>/dev/null; ls /proc | grep -x {other}; \
         touch /usr/mark 2>/dev/null && echo wrote; \
         mount -o remount,bind,rw /usr 2>/dev/null && echo mounted; \
         unshare -Urm true 2>/dev/null && echo unshared; \
         ls /etc/ssl/private >/dev/null 2>&1 && echo keys; \
         grep -q '^CapEff:.0*$' /proc/self/status || echo rights; echo in > answer; echo done",
        secret.path().display(),
        env!("CARGO_MANIFEST_DIR"),
    );
    // Outside the attack finds all of it.
    let (open, _folder) = run(&script, PATIENCE);
    let open = String::from_utf8_lossy(&open.stdout).into_owned();
    assert!(
        open.contains("secret") && open.contains("[package]"),
        "{open}"
    );
    assert!(open.contains(&format!("\n{other}\n")), "{open}");
    let (ended, folder) = run_in(Isolation::Bubblewrap, &[], &script, PATIENCE);
    let told = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(
        told,
        "/episode\ndone\n",
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
    assert_eq!(
        read_answer(&folder.path().join(ANSWER)).unwrap().unwrap(),
        "in\n"
    );
    // A folder that is shown.
    let mounts = [PathBuf::from(env!("CARGO_MANIFEST_DIR"))];
    let (ended, _folder) = run_in(Isolation::Bubblewrap, &mounts, &script, PATIENCE);
    assert!(String::from_utf8_lossy(&ended.stdout).contains("[package]"));
}

/// Has earned 1 where the answer is yes.
#[derive(Default)]
struct Question {
    /// What is made once its tools are open; it lends none unless given.
    mark: Option<PathBuf>,
}

impl Environment for Question {
    fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
        Ok(vec![Message::user("Say yes.")])
    }

    fn tools(&self) -> &[ToolSpec] {
        &[]
    }

    fn step(&mut self, _: &ParsedTurn) -> Result<StepResult, EnvError> {
        Ok(self.close(None))
    }

    fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
        StepResult {
            observation: Vec::new(),
            reward: Some(0.0),
            rewards: indexmap::IndexMap::new(),
            done: true,
            status: Some(EpisodeStatus::NoSubmission),
            fault: None,
        }
    }

    fn submit(&mut self, answer: &str) -> StepResult {
        let reward = f64::from(u8::from(answer.trim() == "yes"));
        StepResult {
            reward: Some(reward),
            ..self.close(None)
        }
    }

    fn lends_tools(&self) -> bool {
        self.mark.is_some()
    }

    fn open_tools(&mut self, is_over: &dyn Fn() -> bool) -> Result<(), EnvError> {
        assert!(!is_over());
        fs::write(self.mark.as_ref().unwrap(), "").unwrap();
        Ok(())
    }

    fn stats(&self) -> EpisodeStats {
        EpisodeStats::default()
    }
}

/// Asks twice, and leaves no answer whatever it was told.
const ASKS_TWICE: &str = r#"
place=${OPENAI_BASE_URL#http://}; place=${place%/v1}
body='{"messages":[{"role":"user","content":"hi"}]}'
for _ in 1 2; do
    exec 3<>"/dev/tcp/${place/://}"
    printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n' \
        "$OPENAI_API_KEY" >&3
    printf 'Connection: close\r\nContent-Length: %d\r\n\r\n%s' "${#body}" "$body" >&3
    cat <&3 >/dev/null
done
"#;

/// Plays an episode of a script in front of a model elsewhere.
fn play(url: String, script: &str, environment: Question) -> Trajectory {
    let upstream = Upstream::new(UpstreamConfig::new(url)).unwrap();
    let served = Served::over(Backend::Upstream(upstream), None).unwrap();
    let mut config = config("bash");
    config.command.extend(["-c", script].map(str::to_owned));
    config.timeout = PATIENCE;
    if let Some(mark) = &environment.mark {
        let mark = mark.to_string_lossy().into_owned();
        config.variables.insert("MARK".to_owned(), mark);
    }
    let stop = AtomicBool::new(false);
    let model = ServedModel {
        name: "m".to_owned(),
        template: ChatTemplate::new("").unwrap(),
        tokenizer: Tokenizer::byte_level(&[]).unwrap(),
        stop_token_ids: Vec::new(),
        tool_call_format: ToolCallFormat::Hermes,
    };
    let collector = AgentCollector::new(&config, model, &stop);
    let request = Request {
        group: 0,
        task_id: "t".to_owned(),
        sample: 0,
        environment: Box::new(environment),
        seed: 0,
    };
    let seed = CollectionSeed {
        run: 0,
        purpose: "test",
        step: 1,
        draw: 0,
    };
    let mut rows = collector.play(&served, request, seed);
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows.remove(0)
}

/// Its time must not pass while it waits for what its tools work with.
#[test]
fn an_agent_begins_once_its_tools_are_open() {
    let folder = folder();
    let answer = json!({
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "yes"}}],
    });
    let answer = answer.to_string();
    let url = serve(move |_| whole("200 OK", &answer));
    let script = format!("[ -e \"$MARK\" ] && echo yes > answer\n{ASKS_TWICE}");
    let mark = Some(folder.path().join("mark"));
    let row = play(url, &script, Question { mark });
    assert_eq!(row.reward, Some(1.0), "{row:?}");
}

#[test]
fn an_episode_with_a_call_that_we_failed_is_not_the_policys() {
    let answer = json!({
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "yes"}}],
    });
    for fails in [false, true] {
        let (answer, asked) = (answer.to_string(), AtomicUsize::new(0));
        let url = serve(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
            1 if fails => whole("500 Oops", "{}"),
            _ => whole("200 OK", &answer),
        });
        let row = play(url, ASKS_TWICE, Question::default());
        match &row.status {
            Status::Failed { reason } if fails => {
                assert!(reason.contains("1 of the agent's calls"), "{reason}");
                assert_eq!(row.reward, None);
            }
            _ => assert_eq!((fails, row.reward), (false, Some(0.0)), "{row:?}"),
        }
    }
}
