//! One sandbox in the cluster.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::cluster::Link;
use super::exec::{self, End, Program, Ran, Streams};
use super::fate::{Fate, fate};
use super::mark::Mark;
use super::run::pods;
use super::script::{self, MAX_INLINE};
use super::{Machine, Pod, Use};
use crate::actor::transfer::{self, Shell};
use crate::actor::{
    Actor, ActorCommand, ActorError, ActorLimits, ActorOutput, ActorSnapshot, ActorSpec, Captured,
    Ending, FileTree, TreeLimits, User,
};
use crate::process;

/// How long the cluster may take to say what became of a pod whose connection has ended.
const TELLING: Duration = Duration::from_secs(10);
/// What is left for killing processes and asking for a pod, besides a command's time and the requests'.
const ENDING: Duration = Duration::from_secs(60);

/// A sandbox in the cluster.
#[derive(Debug)]
pub(super) struct KubernetesActor {
    machine: Arc<Machine>,
    /// Its claim's name.
    claim: String,
    pod: Pod,
    spec: ActorSpec,
    /// While it is held its pool is kept.
    _pool: Use,
    claimed: Instant,
    until: Instant,
    /// Why it takes no further command; held while one runs.
    ended: Mutex<Option<Ended>>,
}

/// Whose doing it was that a sandbox has ended.
#[derive(Debug, Clone)]
enum Ended {
    Guests(Ending),
    Ours(String),
}

impl KubernetesActor {
    pub(super) fn new(
        machine: Arc<Machine>,
        claim: String,
        pod: Pod,
        spec: ActorSpec,
        pool: Use,
    ) -> Self {
        Self {
            until: process::deadline(spec.limits.lifetime),
            claimed: Instant::now(),
            machine,
            claim,
            pod,
            spec,
            _pool: pool,
            ended: Mutex::new(None),
        }
    }

    /// Makes the folders of its spec, or says what of them cannot be used.
    pub(super) fn make_folders(&self) -> Result<(), ActorError> {
        let script = "for f in \"$@\"; do mkdir -p \"$f\" && [ -w \"$f\" ] || { echo \"$f\" >&2; exit 1; }; done; \
                      command -v tar >/dev/null || { echo 'there is no tar' >&2; exit 1; }";
        let mut argv = ["/bin/sh", "-c", script, "sh"].map(str::to_owned).to_vec();
        let folders = self.spec.writable.iter().chain([&self.spec.workdir]);
        argv.extend(folders.map(|folder| folder.to_string_lossy().into_owned()));
        let command = ActorCommand {
            cwd: Some("/".into()),
            ..ActorCommand::new(argv)
        };
        let output = self.exec(&command)?;
        match output.is_success() {
            true => Ok(()),
            false => Err(ActorError::Backend {
                activity: "making the folders of an actor".to_owned(),
                message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Ended>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that it takes no further command, and deletes it.
    fn end(&self, ended: &mut Option<Ended>, why: Ended) {
        if ended.is_none() {
            self.machine.release(self.claim.clone());
        }
        *ended = Some(why);
    }

    fn lost(&self, reason: String) -> ActorError {
        ActorError::Lost {
            id: self.pod.name.clone(),
            reason,
        }
    }
}

impl Shell for KubernetesActor {
    fn exec_as(&self, command: &ActorCommand, _user: User) -> Result<ActorOutput, ActorError> {
        transfer::check(command)?;
        let limits = self.spec.limits;
        let mark = Mark::new();
        let script = script::script(command, &self.spec.workdir, limits.open_files, &mark)?;
        let mut ended = self.lock();
        match &*ended {
            Some(Ended::Guests(ending)) => return Ok(ActorOutput::of(ending.clone())),
            Some(Ended::Ours(reason)) => return Err(self.lost(reason.clone())),
            None => {}
        }
        let started = Instant::now();
        let left = self.until.saturating_duration_since(started);
        if left.is_zero() {
            let over = Ending::TimedOut {
                limit: limits.lifetime,
            };
            self.end(&mut ended, Ended::Guests(over.clone()));
            return Ok(ActorOutput::of(over));
        }
        let time = command.timeout.min(left);
        let streams = Streams::new(command.max_output);
        let told = {
            let (link, pod) = (self.machine.link().clone(), self.pod.clone());
            let streams = streams.clone();
            let program = Program {
                argv: Vec::new(),
                stdin: command.stdin.clone(),
                mark: Some(mark),
            };
            let lived = self.claimed.elapsed();
            // Two requests at most, and one for the pod.
            let most = time + 3 * link.limit + ENDING;
            let cluster = &self.machine.cluster;
            cluster.wait_while_open("running a program", most, async move {
                let ran = start(&link, &pod.name, &script, program, time, &streams).await;
                let fate = tell(&link, &pod, &ran, &limits, lived).await?;
                Ok((ran, fate))
            })
        };
        let (ran, fate) = match told {
            Ok(told) => told,
            Err(error) => {
                // Nobody knows whether the program runs.
                self.end(&mut ended, Ended::Ours(error.to_string()));
                return Err(error);
            }
        };
        let (stdout, stderr) = streams.take();
        let output = |ending: Ending, stdout: Captured, stderr: Captured| ActorOutput {
            ending,
            stdout,
            stderr,
            elapsed: started.elapsed(),
        };
        if let Ok(ran) = &ran
            && ran.timed_out
        {
            let ours = match &fate {
                Fate::Ours(reason) => Some(reason.clone()),
                _ if ran.is_unheard => Some("its processes could not be told to end".to_owned()),
                _ => None,
            };
            if let Some(reason) = ours {
                self.end(&mut ended, Ended::Ours(reason.clone()));
                return Err(self.lost(reason));
            }
            if ran.is_loose {
                let why = Ending::Killed {
                    reason: "its processes did not end when they were killed".to_owned(),
                };
                self.end(&mut ended, Ended::Guests(why));
            }
            let limit = time.min(limits.lifetime);
            return Ok(output(Ending::TimedOut { limit }, stdout, stderr));
        }
        match (fate, ran) {
            (Fate::Guests(ending), _) => {
                self.end(&mut ended, Ended::Guests(ending.clone()));
                Ok(output(ending, stdout, stderr))
            }
            (Fate::Ours(reason), _) => {
                self.end(&mut ended, Ended::Ours(reason.clone()));
                Err(self.lost(reason))
            }
            (Fate::Runs, Err(error)) => Err(error),
            (Fate::Runs, Ok(ran)) => match ran.end {
                End::Exited(code) => Ok(output(Ending::Exited { code }, stdout, stderr)),
                End::Refused(message) => Err(ActorError::Backend {
                    activity: "starting a program".to_owned(),
                    message,
                }),
                End::Cut(why) => {
                    let reason = format!("the connection to a program was lost: {why}");
                    self.end(&mut ended, Ended::Ours(reason.clone()));
                    Err(self.lost(reason))
                }
            },
        }
    }
}

/// Runs a script by the shell of the pod's image, as the program that is given.
async fn start(
    link: &Link,
    pod: &str,
    script: &str,
    mut program: Program,
    time: Duration,
    streams: &Streams,
) -> Result<Ran, ActorError> {
    if script.len() <= MAX_INLINE {
        program.argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        return exec::run(link, pod, program, time, streams).await;
    }
    let file = format!("/tmp/.wardian-{:016x}", rand::random::<u64>());
    let write = ["/bin/sh", "-c", "umask 077; cat > \"$1\"", "sh", &file];
    let write = Program {
        argv: write.map(str::to_owned).to_vec(),
        stdin: format!("rm -f -- \"$0\"\n{script}\n").into_bytes(),
        mark: None,
    };
    let written = exec::run(link, pod, write, time, streams).await?;
    if written.timed_out || written.end != End::Exited(0) {
        return Ok(written);
    }
    program.argv = ["/bin/sh", &file].map(str::to_owned).to_vec();
    exec::run(link, pod, program, time, streams).await
}

/// Returns what became of the pod, where how the program ended leaves that open.
async fn tell(
    link: &Link,
    pod: &Pod,
    ran: &Result<Ran, ActorError>,
    limits: &ActorLimits,
    lived: Duration,
) -> Result<Fate, ActorError> {
    let patience = match ran {
        Ok(ran) => match &ran.end {
            End::Exited(_) | End::Refused(_) => Duration::ZERO,
            End::Cut(_) if ran.timed_out => Duration::ZERO,
            End::Cut(_) => TELLING,
        },
        Err(_) => Duration::ZERO,
    };
    let until = Instant::now() + patience;
    loop {
        let found = link.get(&pods(), &pod.name).await?;
        // Controllers make another pod of the name, in which nothing is as it was.
        let is_other = |found: &Value| found["metadata"]["uid"] != pod.uid.as_str();
        if found.as_ref().is_some_and(is_other) {
            return Ok(Fate::Ours("its pod was replaced by another".to_owned()));
        }
        let fate = fate(found.as_ref(), limits, lived);
        if fate != Fate::Runs || Instant::now() >= until {
            return Ok(fate);
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

impl Actor for KubernetesActor {
    fn id(&self) -> &str {
        &self.pod.name
    }

    fn spec(&self) -> &ActorSpec {
        &self.spec
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        self.exec_as(command, self.spec.user)
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        transfer::put(self, folder, tree)
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        transfer::get(self, path, limits)
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        Err(ActorError::Unsupported {
            backend: self.machine.name(),
            ability: "keep a sandbox; start each member of a group from the spec",
        })
    }

    fn logs(&self) -> String {
        self.machine.describe(&self.pod.name)
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        let mut ended = self.lock();
        if ended.is_none() {
            *ended = Some(Ended::Ours("it was destroyed".to_owned()));
            self.machine.release_now(self.claim.clone())?;
        }
        Ok(())
    }
}

impl Drop for KubernetesActor {
    fn drop(&mut self) {
        let mut ended = self.lock();
        self.end(&mut ended, Ended::Ours("it was destroyed".to_owned()));
    }
}
