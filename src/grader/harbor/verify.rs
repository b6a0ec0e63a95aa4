//! Running a verifier after the agent is done.

use std::time::Duration;

use indexmap::IndexMap;

use super::rewards::{MAX_REWARD_BYTES, RewardFault, Rewards};
use crate::grader::{
    GradingCommand, GradingEnd, GradingFault, GradingFile, GradingOutput, GradingSandbox,
    GradingUser,
};

/// How long one step besides the verifier itself may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// Ends what the agent left running and removes what it put where the verifier reads and writes.
///
/// The shell, what started it and the first process of the sandbox stay.
const CLEAN: &str = r#"
keep=" 1 "
pid=$$
while [ "$pid" -gt 1 ]; do
  keep="$keep$pid "
  parent=0
  while read -r key value _; do
    [ "$key" = PPid: ] && parent=$value
  done < "/proc/$pid/status"
  pid=$parent
done
# Again, until two passes find nobody: who is killed, or ends by itself, may have started another.
found=1
quiet=0
passes=0
while [ "$quiet" -lt 2 ] && [ "$passes" -lt 100 ]; do
  found=0
  passes=$((passes + 1))
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    case "$keep" in
      *" $pid "*) ;;
      *)
        # Where it cannot be read it has just ended. One whose first thread has ended is a zombie to look at, while
        # others of its threads run.
        state=gone
        threads=1
        while read -r key value _; do
          [ "$key" = State: ] && state=$value
          [ "$key" = Threads: ] && threads=$value
        done 2>/dev/null < "$folder/status"
        kill -KILL "$pid" 2>/dev/null
        [ "$state" = Z ] && [ "$threads" -le 1 ] || found=1
        ;;
    esac
  done
  [ "$found" = 1 ] && quiet=0 || quiet=$((quiet + 1))
done
[ "$quiet" = 2 ] || { echo "processes of the agent do not end" >&2; exit 1; }
for place in ${2:+"$2"} /logs/verifier; do
  # Where it is a mount of the sandbox's, all but the folder itself goes.
  rm -rf -- "$place" 2>/dev/null
  mkdir -p "$place" || exit 1
  for left in "$place"/* "$place"/.[!.]* "$place"/..?*; do
    if [ -e "$left" ] || [ -L "$left" ]; then
      echo "$left is left" >&2
      exit 1
    fi
  done
done
chmod "$1" /logs/verifier
"#;

/// Lets the script be run.
const ALLOW: &str = r#"chmod +x -- "$1""#;

/// Runs the script, whose two outputs become one. Another user than the sandbox's cannot change its rights.
const RUN: &str = r#"[ -x "$1" ] || chmod +x -- "$1" && exec "$1" 2>&1"#;

/// A verifier to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyJob {
    /// Files for `/tests`, by their path in it; none where the image holds them.
    pub tests: IndexMap<String, GradingFile>,
    /// The script, in the sandbox.
    pub script: String,
    /// Variables of the script.
    pub env: IndexMap<String, String>,
    /// The folder that it starts in; the sandbox's own where none.
    pub workdir: Option<String>,
    /// Who it runs as; the sandbox's own user where none.
    pub user: Option<GradingUser>,
    /// How long it may take.
    pub timeout: Duration,
}

/// What a verifier left.
#[derive(Debug, Clone, PartialEq)]
pub struct Verification {
    /// Its rewards, or why there are none.
    pub rewards: Result<Rewards, RewardFault>,
    /// Harbor's name of what ended it, where that was not itself.
    pub ended: Option<&'static str>,
    /// Whether the sandbox failed, and not by what was done in it.
    pub is_our_fault: bool,
    /// Whether it ran out of its time, as it also may on a machine that is busy with something else.
    pub timed_out: bool,
    /// What it printed, or why it did not run.
    pub output: String,
}

/// Runs a verifier: only now are its tests brought to the sandbox, and rewards that lay there before
/// are removed. Its exit code says nothing.
#[must_use]
pub fn verify(sandbox: &dyn GradingSandbox, job: &VerifyJob) -> Verification {
    let without = |ended, output: String| Verification {
        rewards: Err(RewardFault::Missing),
        ended: Some(ended),
        is_our_fault: false,
        timed_out: false,
        output,
    };
    let late = |ended, output| Verification {
        timed_out: true,
        ..without(ended, output)
    };
    let failed = |ended, fault: &GradingFault| Verification {
        is_our_fault: !fault.is_guests_doing,
        timed_out: fault.timed_out,
        ..without(ended, told(fault))
    };
    match bring_tests(sandbox, job) {
        Ok(Brought::All) => {}
        Ok(Brought::Blocked(why)) => return without("AddTestsDirError", why),
        Ok(Brought::Late(why)) => return late("AddTestsDirError", why),
        Err(fault) => return failed("AddTestsDirError", &fault),
    }
    let mut command = GradingCommand::sh(RUN, &job.script, job.timeout);
    command.workdir.clone_from(&job.workdir);
    command.env.clone_from(&job.env);
    command.user = job.user;
    let output = match sandbox.exec(&command) {
        Ok(output) => output,
        Err(fault) => return failed("RuntimeRequestError", &fault),
    };
    match output.end {
        GradingEnd::Exited(_) => {}
        GradingEnd::TimedOut => return late("VerifierTimeoutError", output.stdout),
        GradingEnd::Killed(why) => return without("SandboxLikelyOutOfMemoryError", why),
    }
    let file = |name: &str| sandbox.get(&format!("/logs/verifier/{name}"), MAX_REWARD_BYTES + 1);
    let files = file("reward.json").and_then(|json| Ok((json, file("reward.txt")?)));
    match files {
        Ok((json, text)) => Verification {
            rewards: Rewards::read(json.as_deref(), text.as_deref()),
            ended: None,
            is_our_fault: false,
            timed_out: false,
            output: output.stdout,
        },
        Err(fault) => failed("DownloadVerifierDirError", &fault),
    }
}

/// What became of bringing the tests.
enum Brought {
    /// They are there.
    All,
    /// The sandbox's own programs say that there is no clean place for them; why.
    Blocked(String),
    /// Cleaning took too long.
    Late(String),
}

/// Brings the tests to a clean place.
fn bring_tests(sandbox: &dyn GradingSandbox, job: &VerifyJob) -> Result<Brought, GradingFault> {
    // Those of the image stay.
    let tests = if job.tests.is_empty() { "" } else { "/tests" };
    // Another user than the sandbox's must write there, too; nobody else need.
    let mode = if job.user.is_some() { "777" } else { "755" };
    let mut clean = GradingCommand::sh(CLEAN, mode, STEP_TIMEOUT);
    clean.argv.push(tests.to_owned());
    let cleaned = sandbox.exec(&clean)?;
    let GradingOutput { end, stderr, .. } = cleaned;
    let why = || format!("the sandbox could not be cleaned: {stderr}");
    match end {
        GradingEnd::Exited(0) => {}
        GradingEnd::TimedOut => return Ok(Brought::Late(why())),
        GradingEnd::Exited(_) | GradingEnd::Killed(_) => return Ok(Brought::Blocked(why())),
    }
    if !job.tests.is_empty() {
        sandbox.put_all("/tests", &job.tests)?;
    }
    if job.user.is_some() {
        // Where it cannot be, running it says so.
        let allowed = sandbox.exec(&GradingCommand::sh(ALLOW, &job.script, STEP_TIMEOUT))?;
        if allowed.end == GradingEnd::TimedOut {
            return Ok(Brought::Late("the script was not made one".to_owned()));
        }
    }
    Ok(Brought::All)
}

fn told(fault: &GradingFault) -> String {
    format!("{fault}: {}", fault.source)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A sandbox that holds files and does what it is told in place of the verifier.
    #[derive(Default)]
    struct Files {
        files: RefCell<IndexMap<String, Vec<u8>>>,
        written: Vec<(&'static str, &'static str)>,
        end: Option<GradingEnd>,
        log: RefCell<Vec<String>>,
    }

    impl GradingSandbox for Files {
        fn exec(&self, command: &GradingCommand) -> Result<GradingOutput, GradingFault> {
            let is_clean = command.argv[2] == CLEAN;
            let mut end = GradingEnd::Exited(if is_clean { 0 } else { 1 });
            if is_clean {
                self.log.borrow_mut().push("clean".to_owned());
                self.files.borrow_mut().clear();
            } else if command.argv[2] == ALLOW {
                assert_eq!(command.user, None);
                self.log.borrow_mut().push("allow".to_owned());
                end = GradingEnd::Exited(0);
            } else {
                let script = &command.argv[4];
                let user = command.user.map(|user| format!(" as {}", user.uid));
                let user = user.unwrap_or_default();
                self.log.borrow_mut().push(format!("run {script}{user}"));
                for (path, text) in &self.written {
                    let mut files = self.files.borrow_mut();
                    files.insert((*path).to_owned(), text.as_bytes().to_vec());
                }
                end = self.end.clone().unwrap_or(end);
            }
            Ok(GradingOutput {
                end,
                stdout: String::new(),
                stderr: String::new(),
                elapsed: Duration::ZERO,
            })
        }

        fn put(&self, path: &str, content: &[u8]) -> Result<(), GradingFault> {
            self.log.borrow_mut().push(format!("put {path}"));
            self.files
                .borrow_mut()
                .insert(path.to_owned(), content.to_vec());
            Ok(())
        }

        fn put_all(
            &self,
            folder: &str,
            files: &IndexMap<String, GradingFile>,
        ) -> Result<(), GradingFault> {
            for (path, file) in files {
                self.put(&format!("{folder}/{path}"), &file.content)?;
            }
            Ok(())
        }

        fn get(&self, path: &str, _: u64) -> Result<Option<Vec<u8>>, GradingFault> {
            Ok(self.files.borrow().get(path).cloned())
        }
    }

    fn job() -> VerifyJob {
        VerifyJob {
            tests: IndexMap::from([(
                "test.sh".to_owned(),
                GradingFile {
                    content: b"#!/bin/sh\n".to_vec(),
                    executable: false,
                },
            )]),
            script: "/tests/test.sh".to_owned(),
            env: IndexMap::new(),
            workdir: None,
            user: None,
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn tests_come_after_the_agent_and_old_rewards_go_before_them() {
        let sandbox = Files::default();
        let stale = b"1".to_vec();
        (sandbox.files.borrow_mut()).insert("/logs/verifier/reward.txt".to_owned(), stale);
        let found = verify(&sandbox, &job());
        assert_eq!(found.rewards, Err(RewardFault::Missing));
        let log = sandbox.log.into_inner();
        assert_eq!(log, ["clean", "put /tests/test.sh", "run /tests/test.sh"]);
    }

    /// The place is cleaned and filled by the sandbox's own user, who may.
    #[test]
    fn the_script_alone_runs_as_the_verifiers_user() {
        let sandbox = Files {
            written: vec![("/logs/verifier/reward.txt", "1")],
            ..Files::default()
        };
        let user = Some(GradingUser { uid: 7, gid: 8 });
        let found = verify(&sandbox, &VerifyJob { user, ..job() });
        assert_eq!(found.rewards.unwrap().main(), Ok(1.0));
        let log = sandbox.log.into_inner();
        let expected = [
            "clean",
            "put /tests/test.sh",
            "allow",
            "run /tests/test.sh as 7",
        ];
        assert_eq!(log, expected);
    }

    #[test]
    fn the_reward_counts_and_not_the_exit_code() {
        let sandbox = Files {
            written: vec![("/logs/verifier/reward.txt", "0.5\n")],
            ..Files::default()
        };
        let found = verify(&sandbox, &job());
        assert_eq!(found.rewards.unwrap().main(), Ok(0.5));
        assert_eq!(found.ended, None);
    }

    #[test]
    fn a_verifier_that_is_stopped_has_no_reward_even_where_it_left_one() {
        let sandbox = Files {
            written: vec![("/logs/verifier/reward.json", "{\"reward\": 1}")],
            end: Some(GradingEnd::TimedOut),
            ..Files::default()
        };
        let found = verify(&sandbox, &job());
        assert_eq!(found.ended, Some("VerifierTimeoutError"));
        assert!(found.timed_out);
        assert_eq!(found.rewards, Err(RewardFault::Missing));
    }

    /// In a process namespace of its own, which is what every sandbox has.
    #[test]
    fn what_the_agent_left_running_is_ended_and_the_shell_is_not() {
        let kill = CLEAN.split_once("for place in").unwrap().0;
        let script = format!("sleep 5 & left=$!; {kill} wait $left; echo ended $?");
        let output = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "--map-root-user"])
            .args(["/bin/sh", "-c", &script])
            .output()
            .expect("util-linux is installed");
        if !output.status.success() {
            // Without namespaces the script would end the programs of whoever runs the tests.
            eprintln!(
                "skipped: no namespaces: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            return;
        }
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ended 137\n");
    }

    /// Its first thread has ended, and another goes on.
    #[test]
    fn who_looks_like_a_zombie_is_ended_too() {
        let kill = CLEAN.split_once("for place in").unwrap().0;
        let program = "import ctypes, os, threading, time\n\
                       def go_on():\n    while True:\n        open(os.environ['MARK'], 'w').close()\n        time.sleep(0.01)\n\
                       threading.Thread(target=go_on).start()\nctypes.CDLL(None).syscall(60, 0)\n";
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let script = format!(
            "python3 -c \"$PROGRAM\" & sleep 1; grep State: /proc/$!/status; {kill} \
             rm -f \"$MARK\"; sleep 0.3; ls \"$MARK\" 2>/dev/null; echo over"
        );
        let output = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "--map-root-user"])
            .args(["/bin/sh", "-c", &script])
            .env("PROGRAM", program)
            .env("MARK", &mark)
            .output()
            .expect("util-linux is installed");
        if !output.status.success() {
            eprintln!("skipped: no namespaces: {output:?}");
            return;
        }
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(told, "State:\tZ (zombie)\nover\n");
    }

    /// Each of its processes ends as soon as it has started the next.
    #[test]
    fn who_forks_and_ends_for_ever_is_ended_too() {
        let kill = CLEAN.split_once("for place in").unwrap().0;
        let script = format!(
            "CHAIN='sh -c \"$CHAIN\" & exit'; export CHAIN; sh -c \"$CHAIN\" & sleep 0.2; {kill} \
             sleep 0.2; set -- /proc/[0-9]*; echo left $#"
        );
        let output = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "--map-root-user"])
            .args(["/bin/sh", "-c", &script])
            .output()
            .expect("util-linux is installed");
        if !output.status.success() {
            eprintln!("skipped: no namespaces: {output:?}");
            return;
        }
        assert_eq!(String::from_utf8_lossy(&output.stdout), "left 1\n");
    }
}
