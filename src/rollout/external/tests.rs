use std::os::unix::fs::symlink;

use super::*;

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
