//! `wardian doctor`: faults are planted, and each must be found and its remedy named.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rstest::rstest;
use serde_json::Value;

/// What a run says, and where: no file of the user is looked at.
pub(crate) struct Patient {
    folder: tempfile::TempDir,
    variables: Vec<(&'static str, String)>,
}

/// What was found.
pub(crate) struct Diagnosis {
    code: Option<i32>,
    report: Value,
    /// All that was printed.
    text: String,
}

impl Patient {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path().join("cache").display().to_string();
        let variables = vec![("WARDIAN_CACHE", cache), ("HF_HUB_OFFLINE", "1".to_owned())];
        Self { folder, variables }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.variables.retain(|(known, _)| *known != name);
        self.variables.push((name, value.into()));
        self
    }

    fn without(mut self, name: &'static str) -> Self {
        self.variables.retain(|(known, _)| *known != name);
        self
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        fs_err::write(&path, text).expect("it is written");
        path
    }

    /// Makes a command that has nothing of this process' environment but `PATH`.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path())
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    pub(crate) fn examine(&self, arguments: &[&str]) -> Diagnosis {
        let mut command = self.command(env!("CARGO_BIN_EXE_wardian"));
        command.args(["doctor", "--format", "json"]).args(arguments);
        Diagnosis::of(&mut command)
    }
}

impl Diagnosis {
    fn of(command: &mut Command) -> Self {
        let output = command.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        let report = serde_json::from_slice(&output.stdout);
        Self {
            code: output.status.code(),
            report: report.unwrap_or_else(|error| panic!("{error}: {text}")),
            text,
        }
    }

    /// Returns the findings of a state.
    fn findings(&self, state: &str) -> Vec<&Value> {
        let all = self.report["findings"].as_array().expect("a list");
        all.iter()
            .filter(|finding| finding["state"] == state)
            .collect()
    }

    /// Checks that a check found what is wrong, and named what mends it.
    #[track_caller]
    pub(crate) fn shows(&self, check: &str, about: &str, fix: &str) {
        let wrong = self.findings("wrong");
        let found = wrong.iter().any(|finding| {
            let has = |key: &str, part: &str| {
                finding[key]
                    .as_str()
                    .is_some_and(|text| text.contains(part))
            };
            finding["check"] == check && has("about", about) && has("fix", fix)
        });
        assert!(
            found,
            "no `{check}` with `{about}` and `{fix}` in {}",
            self.text
        );
        assert_eq!(self.code, Some(1), "{}", self.text);
        let count = self.report["wrong"].as_u64();
        assert_eq!(count, Some(wrong.len() as u64), "{}", self.text);
    }

    #[track_caller]
    pub(crate) fn is_well(&self) {
        assert_eq!(self.code, Some(0), "{}", self.text);
        assert!(self.findings("wrong").is_empty(), "{}", self.text);
    }
}

/// Answers requests with the same bytes until the test ends, and returns its address.
fn server(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it has one");
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(answer.as_bytes());
            if answer.is_empty() {
                // It says nothing, and does not hang up.
                kept.push(stream);
            }
        }
    });
    format!("http://{address}")
}

#[test]
fn a_machine_without_faults_is_well() {
    let patient = Patient::new();
    let found = patient.examine(&[]);
    found.is_well();
    for check in ["cpu", "memory", "disk", "limits", "clock"] {
        let fine = found.findings("fine");
        assert!(
            fine.iter().any(|finding| finding["check"] == check),
            "{}",
            found.text
        );
    }
    // For people, too, and nothing is left behind but the cache's own folder.
    let mut command = patient.command(env!("CARGO_BIN_EXE_wardian"));
    let output = command.arg("doctor").output().expect("it starts");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("ok    cpu"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Nothing is wrong"));
    let left = fs_err::read_dir(patient.path())
        .expect("it is there")
        .count();
    assert_eq!(left, 1);
}

#[rstest]
#[case::unknown_key(
    "[trainer]\nstepz = 3",
    "run",
    "did you mean `trainer.steps`?",
    "run.toml"
)]
#[case::wrong_value("seed = 'x'", "run", "`seed` can not be", "docs/run-file.md")]
#[case::missing_model(
    "model.path = '/no/such/model'",
    "model",
    "no folder or file",
    "hf download"
)]
#[case::no_tasks("model.path = 'starter'", "tasks", "names no tasks", "--tasks")]
#[case::missing_tasks(
    "model.path = 'starter'\ntask.path = '/no/such.jsonl'",
    "tasks",
    "no file or folder",
    "wardian task validate"
)]
#[case::little_memory(
    "model.path = 'starter'\ntask.path = 'starter'\ntrainer.memory_budget = '1MiB'",
    "memory",
    "the least that this run needs",
    "wardian plan --config"
)]
#[case::hub_and_no_network(
    "model.path = 'owner/model'\ntask.path = 'starter'",
    "hub",
    "`owner/model` is not in the cache",
    "unset HF_HUB_OFFLINE && hf download owner/model"
)]
#[case::environment_elsewhere(
    "model.path = 'starter'\nenv = { url = 'http://127.0.0.1:9', episodes = 10 }",
    "ports",
    "the server of `env.url`",
    "wardian serve --env"
)]
fn what_a_run_file_asks_and_is_not_there_is_found(
    #[case] text: &str,
    #[case] check: &str,
    #[case] about: &str,
    #[case] fix: &str,
) {
    let patient = Patient::new();
    patient.write("run.toml", text);
    patient
        .examine(&["--config", "run.toml"])
        .shows(check, about, fix);
}

#[test]
fn a_model_folder_that_lacks_files_is_found() {
    let patient = Patient::new();
    fs_err::create_dir(patient.path().join("model")).expect("made");
    patient.write("model/config.json", "{}");
    let found = patient.examine(&["--model", "model"]);
    found.shows(
        "model",
        "lacks tokenizer.json, *.safetensors",
        "hf download",
    );
}

#[test]
fn a_cache_that_cannot_be_written_is_found() {
    let patient = Patient::new();
    // Root may write into any folder, so it is a file.
    let file = patient.write("file", "");
    let patient = patient.with("WARDIAN_CACHE", file.join("cache").display().to_string());
    let found = patient.examine(&[]);
    found.shows("disk", "cannot be written", "export WARDIAN_CACHE=DIR");
    found.shows("runtime", "cache", "export WARDIAN_CACHE=DIR");
}

#[test]
fn a_cache_that_others_may_write_is_found() {
    let patient = Patient::new();
    let cache = patient.path().join("cache");
    fs_err::create_dir(&cache).expect("made");
    fs_err::set_permissions(&cache, PermissionsExt::from_mode(0o777)).expect("set");
    patient
        .examine(&[])
        .shows("runtime", "cache", "chmod -R go-w");
}

#[test]
fn a_full_disk_is_found() {
    let patient = Patient::new();
    let disk = patient.path().join("disk");
    fs_err::create_dir(&disk).expect("made");
    let mut mount = Command::new("mount");
    mount
        .args(["-t", "tmpfs", "-o", "size=1m", "none"])
        .arg(&disk);
    let is_mounted = mount.output().is_ok_and(|output| output.status.success());
    if !is_mounted {
        eprintln!("skipped: a small disk cannot be mounted without root");
        return;
    }
    let patient = patient.with("TMPDIR", disk.display().to_string());
    let found = patient.examine(&["--out", "disk/runs/new"]);
    let _ = Command::new("umount").arg("-l").arg(&disk).output();
    found.shows(
        "disk",
        "run folder `disk/runs/new`: 1.0 MiB are free",
        "--out DIR",
    );
    found.shows("disk", "temporary files", "export TMPDIR=DIR");
}

#[test]
fn a_damaged_runtime_is_found_and_mended_by_what_is_named() {
    let patient = Patient::new();
    let build = || {
        let mut command = patient.command(env!("CARGO_BIN_EXE_wardian"));
        let output = command
            .args(["runtime", "build"])
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{output:?}");
    };
    build();
    let found = patient.examine(&[]);
    found.is_well();
    assert!(
        found.text.contains("is in the cache, and runs programs"),
        "{}",
        found.text
    );
    let cache = fs_err::read_dir(patient.path().join("cache")).expect("it is there");
    let mut paths = cache.map(|entry| entry.expect("readable").path());
    let code = paths.find(|path| path.extension().is_some_and(|end| end == "cwasm"));
    let code = code.expect("code is kept");
    let mut bytes = fs_err::read(&code).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs_err::write(&code, bytes).expect("written");
    patient.examine(&[]).shows(
        "runtime",
        "is damaged in the cache",
        "wardian runtime build",
    );
    build();
    patient.examine(&[]).is_well();
    // One of another version is no fault.
    let keys = fs_err::read_dir(patient.path().join("cache")).expect("it is there");
    for path in keys.map(|entry| entry.expect("readable").path()) {
        if path.is_file() && path.extension().is_none() {
            fs_err::rename(&path, path.with_file_name("0".repeat(64))).expect("renamed");
        }
    }
    let found = patient.examine(&[]);
    found.is_well();
    assert!(found.text.contains("1 of other versions"), "{}", found.text);
}

#[test]
fn a_port_that_is_taken_is_found() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("it has one").to_string();
    let found = Patient::new().examine(&["--listen", &address]);
    found.shows("ports", "is taken by another program", "ss -ltnp");
    let patient = Patient::new()
        .with("RANK", "0")
        .with("WORLD_SIZE", "2")
        .with("MASTER_ADDR", "127.0.0.1")
        .with(
            "MASTER_PORT",
            taken.local_addr().expect("it has one").port().to_string(),
        )
        .with("WARDIAN_CLUSTER_TOKEN", "a secret of the processes");
    let found = patient.examine(&[]);
    found.shows("ports", "is taken by another program", "ss -ltnp");
    assert!(!found.text.contains("a secret of"), "{}", found.text);
}

#[test]
fn a_program_that_tasks_need_is_missed() {
    let empty = tempfile::tempdir().expect("a folder");
    let patient = Patient::new().with("PATH", empty.path().display().to_string());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tasks = root.join("examples/harbor").display().to_string();
    let arguments = [
        "--model",
        "starter",
        "--tasks",
        &tasks,
        "--set",
        "actor.root=host",
    ];
    let found = patient.examine(&arguments);
    found.shows(
        "actors",
        "`runsc` is not in `PATH`",
        "apt-get install runsc",
    );
    let bwrap = [&arguments[..], &["--set", "actor.backend=bwrap"]].concat();
    let found = patient.examine(&bwrap);
    found.shows(
        "actors",
        "`bwrap` is not in `PATH`",
        "apt-get install bubblewrap",
    );
    // Who needs neither is not bothered, and who named no run is only told.
    let found = patient.examine(&["--model", "starter", "--tasks", "starter"]);
    found.is_well();
    assert!(!found.text.contains("runsc"), "{}", found.text);
    let found = patient.examine(&[]);
    found.is_well();
    assert!(
        found.text.contains("apt-get install runsc"),
        "{}",
        found.text
    );
}

#[test]
fn what_is_to_be_typed_names_the_whole_run_and_nothing_is_left_in_the_cache() {
    let patient = Patient::new();
    let arguments = [
        "--model",
        "starter",
        "--tasks",
        "starter",
        "--set",
        "trainer.memory_budget = '1MiB'",
    ];
    let found = patient.examine(&arguments);
    let options = r"--model starter --tasks starter --set 'trainer.memory_budget = '\''1MiB'\'''";
    found.shows(
        "memory",
        "",
        &format!("wardian plan {options} --memory SIZE"),
    );
    let cache = fs_err::read_dir(patient.path().join("cache"));
    let left: Vec<_> = (cache.into_iter().flatten())
        .map(|entry| entry.expect("it is listed").file_name())
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn few_open_files_are_found() {
    let patient = Patient::new();
    let mut command = patient.command("sh");
    let script = "ulimit -n 200; exec \"$0\" doctor --format json";
    command.args(["-c", script, env!("CARGO_BIN_EXE_wardian")]);
    let found = Diagnosis::of(&mut command);
    found.shows("limits", "200 files may be open", "nofile");
}

#[test]
fn a_token_that_the_hub_refuses_and_a_clock_that_is_wrong_are_found() {
    let hub = server(
        "HTTP/1.1 401 Unauthorized\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
         content-length: 0\r\nconnection: close\r\n\r\n",
    );
    let patient = Patient::new().without("HF_HUB_OFFLINE");
    let patient = patient
        .with("HF_ENDPOINT", &hub)
        .with("HF_TOKEN", "hf_secret");
    let found = patient.examine(&[]);
    found.shows("hub", "refuses the token", "hf auth login");
    found.shows("clock", "ahead of that of", "timedatectl");
    assert!(!found.text.contains("hf_secret"), "{}", found.text);
    let hub = server(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\
         connection: close\r\n\r\n{\"name\":\"me\"}",
    );
    let found = patient.with("HF_ENDPOINT", hub).examine(&[]);
    found.is_well();
    assert!(
        found.text.contains("knows the token as that of `me`"),
        "{}",
        found.text
    );
}

#[test]
fn a_hub_that_hangs_holds_nobody_up() {
    let patient = Patient::new().without("HF_HUB_OFFLINE");
    let patient = patient.with("HF_ENDPOINT", server(""));
    patient.write(
        "run.toml",
        "model.path = 'owner/model'\ntask.path = 'starter'",
    );
    let found = patient.examine(&["--config", "run.toml"]);
    found.shows("hub", "the hub does not answer", "HF_ENDPOINT");
    // A run that needs nothing of it is told all the same, where it asks for everything.
    let found = patient.examine(&[]);
    found.is_well();
    assert!(found.text.contains("does not answer"), "{}", found.text);
}

#[test]
fn a_gpu_that_this_program_is_not_built_for_is_found() {
    if cfg!(feature = "cuda") {
        eprintln!("skipped: this program is built for GPUs");
        return;
    }
    let patient = Patient::new();
    let row = "#!/bin/sh\necho 'NVIDIA H200, 570.86.15, 9.0, 143771 MiB'\n";
    let tool = patient.write("nvidia-smi", row);
    fs_err::set_permissions(&tool, PermissionsExt::from_mode(0o755)).expect("set");
    let path = format!("{}:/usr/bin:/bin", patient.path().display());
    let patient = patient.with("PATH", path);
    let arguments = [
        "--model",
        "starter",
        "--tasks",
        "starter",
        "--set",
        "model.device=cuda",
    ];
    let found = patient.examine(&arguments);
    found.shows(
        "gpu",
        "NVIDIA H200",
        "CUDA_COMPUTE_CAP=90 cargo install --path . --features cuda",
    );
    patient.write(
        "nvidia-smi",
        "#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n",
    );
    let found = patient.examine(&arguments);
    found.shows("gpu", "Driver/library version mismatch", "modprobe nvidia");
}

#[test]
fn a_cluster_that_cannot_be_reached_is_found() {
    let patient = Patient::new();
    let run = "model.path = 'starter'\ntask.path = 'starter'\nactor.backend = 'kruise'";
    patient.write("run.toml", run);
    let found = patient.examine(&["--config", "run.toml"]);
    if !cfg!(feature = "k8s") {
        found.shows("cluster", "built without clusters", "--features k8s");
        return;
    }
    found.shows("cluster", "there is no kubeconfig", "kubectl proxy");
    let patient = patient.with("KUBECONFIG", "/no/such/kubeconfig");
    let found = patient.examine(&["--config", "run.toml"]);
    found.shows("cluster", "/no/such/kubeconfig", "export KUBECONFIG=FILE");
    patient.examine(&[]).is_well();
    patient.write("kubeconfig", "users: [1, 2");
    let patient = patient.with("KUBECONFIG", "kubeconfig");
    let found = patient.examine(&["--config", "run.toml"]);
    found.shows("cluster", "kubeconfig", "kubectl cluster-info");
}
