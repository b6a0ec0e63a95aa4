//! One machine of another server.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::script::{Frame, MAX_LINE, Place};
use super::{NAME, Shared, lost, named};
use crate::actor::transfer::{self, Shell};
use crate::actor::{
    Actor, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec, Captured, Ending,
    FileTree, TreeLimits, User,
};
use crate::causes::with_causes;
use crate::openenv::client::frames::{self, shortened};
use crate::openenv::client::session::Session;
use crate::openenv::client::slots::Lease;
use crate::openenv::client::{Fault, observe, patiently};
use crate::process;

/// How long a call may take that only carries something.
const CARRY: Duration = Duration::from_secs(30);
/// How long the last words may take.
const FAREWELL: Duration = Duration::from_secs(5);
/// How much later than a command's time a session is ended where the server does not keep to it.
const SLACK: Duration = Duration::from_secs(1);
/// The key of how long an answer may take, as the client's messages name it.
const STEP: &str = "env.step_timeout";

/// A machine of another server.
#[derive(Debug)]
pub(super) struct OpenEnvActor {
    shared: Arc<Shared>,
    id: String,
    spec: ActorSpec,
    place: Place,
    session: Arc<Session>,
    until: Instant,
    /// Why it takes no further command; held while one runs.
    ended: Mutex<Option<Ended>>,
    /// Free for another actor once this has ended.
    _lease: Lease,
}

/// Whose doing it was that it has ended.
#[derive(Debug, Clone)]
enum Ended {
    Guests(Ending),
    Ours(String),
}

/// What came of a call.
enum Came {
    Frame(Frame),
    /// No frame, but this.
    Words(String),
    /// Nothing in time.
    Nothing,
}

/// Why a call or a part of a command is the last.
enum Stop {
    Ended(Ending),
    Failed(ActorError),
}

impl From<ActorError> for Stop {
    fn from(error: ActorError) -> Self {
        Self::Failed(error)
    }
}

impl OpenEnvActor {
    /// Opens a session, resets it, and tries whether its machine can be used.
    pub(super) fn start(
        shared: &Arc<Shared>,
        spec: &ActorSpec,
        reset: &Map<String, Value>,
    ) -> Result<Self, ActorError> {
        const ACTIVITY: &str = "opening a session";
        let lease = shared.slots.lease();
        let slot = lease.slot;
        let endpoint = shared.options.endpoint(slot)?;
        let server = &shared.options.server;
        let (retry, limit) = (server.retry_timeout, server.reset_timeout);
        let id = format!("{} session {slot}", endpoint.url());
        let frame = frames::reset(reset);
        let opening = async move {
            let open = || async {
                let socket = endpoint.open(slot).await?;
                let session = Session::start(socket, endpoint.max_message_bytes());
                (session.ask(frame.clone(), limit, "env.reset_timeout")).await?;
                Ok(session)
            };
            patiently(retry, slot, open).await
        };
        let most = retry + server.connect_timeout + limit;
        let opened = (shared.background).run_while_open(ACTIVITY, most, opening)?;
        let session = opened.map_err(|fault| ActorError::Backend {
            activity: ACTIVITY.to_owned(),
            message: format!("{id}: {}", named(&with_causes(&fault))),
        })?;
        let mut actor = Self {
            shared: Arc::clone(shared),
            id,
            spec: spec.clone(),
            place: Place::new(shared.options.max_output),
            session: Arc::new(session),
            until: process::deadline(spec.limits.lifetime),
            ended: Mutex::new(None),
            _lease: lease,
        };
        actor.spec.user = actor.try_out()?;
        Ok(actor)
    }

    /// Makes the folders, and looks whether pieces come back whole; returns who commands are.
    fn try_out(&self) -> Result<User, ActorError> {
        let unusable = |reason: String| ActorError::Unusable {
            backend: NAME,
            reason: format!("has a machine ({}) that {reason}", self.id),
        };
        let folders = self.spec.writable.iter().chain([&self.spec.workdir]);
        let folders: Vec<&Path> = folders.map(std::path::PathBuf::as_path).collect();
        let begun = match self.call(&self.place.begin(&folders)?, CARRY)? {
            Came::Frame(frame) => frame,
            Came::Words(words) => {
                return Err(unusable(format!(
                    "does not run a shell by `actor.openenv.tool` and `actor.openenv.argument`: it says {}",
                    shortened(&words)
                )));
            }
            Came::Nothing => return Err(unusable("does not answer".to_owned())),
        };
        let [stdout, stderr] = begun.streams.map(|stream| lossy(&stream));
        if begun.code != 0 {
            return Err(unusable(format!(
                "cannot be used: {}",
                shortened(stderr.trim())
            )));
        }
        let mut numbers = stdout.lines().map(|line| line.trim().parse().ok());
        let (Some(Some(uid)), Some(Some(gid))) = (numbers.next(), numbers.next()) else {
            return Err(unusable(format!(
                "does not say who it is: {}",
                shortened(&stdout)
            )));
        };
        let whole = self.call(&self.place.fill(), CARRY)?;
        let piece = self.call(&self.place.piece_at(0, 0), CARRY)?;
        let is_whole = |frame: &Frame| frame.streams[0].len() == self.place.piece();
        match (whole, piece) {
            (Came::Frame(filled), Came::Frame(piece)) if filled.code == 0 && is_whole(&piece) => {}
            _ => {
                return Err(unusable(
                    "does not give back what a command prints as it is; see to `base64`, `head`, `tail`, `tr` and \
                     `wc` in it, and let `actor.openenv.max_output` be what a call gives back uncut"
                        .to_owned(),
                ));
            }
        }
        Ok(User { uid, gid })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Ended>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the tool run a line, once.
    fn call(&self, line: &str, time: Duration) -> Result<Came, ActorError> {
        let options = &self.shared.options;
        let keeps_time = !options.timeout_argument.is_empty();
        let limit = time.saturating_add(match keeps_time {
            true => options.server.step_timeout,
            false => SLACK,
        });
        let frame = frames::step(&options.action(line, time));
        let session = Arc::clone(&self.session);
        let asking = async move { session.ask(frame, limit, STEP).await };
        let asked = (self.shared.background).run_while_open("running a command", limit, asking)?;
        let reply = match asked {
            Ok(reply) => reply,
            Err(Fault::Late { .. }) if !keeps_time => return Ok(Came::Nothing),
            Err(fault) => return Err(lost(&self.id, &fault)),
        };
        if reply.done {
            return Err(ActorError::Lost {
                id: self.id.clone(),
                reason: "its server ended the episode".to_owned(),
            });
        }
        let field = options.output.as_deref();
        let text = match options.tool.as_str() {
            "" => observe::text(&reply.observation, field),
            _ => {
                let told = observe::tool_outcome(&reply.observation, field);
                told.map_err(|fault| lost(&self.id, &fault))?.text
            }
        };
        Ok(match self.place.read(&text) {
            Some(frame) => Came::Frame(frame),
            None => Came::Words(text),
        })
    }

    /// Has a line run that only carries something, and must do what it says.
    fn carry(&self, line: &str) -> Result<Frame, Stop> {
        match self.call(line, CARRY)? {
            Came::Frame(frame) if frame.code == 0 => Ok(frame),
            // It could before the guest was there.
            Came::Frame(_) | Came::Words(_) | Came::Nothing => Err(Stop::Ended(Ending::Killed {
                reason: "its shell does not do any more what it is told, or it is full".to_owned(),
            })),
        }
    }

    /// Brings bytes into a file of the machine.
    fn bring(&self, name: &str, bytes: &[u8]) -> Result<(), Stop> {
        self.carry(&self.place.empty(name))?;
        for line in self.place.add(name, bytes) {
            self.carry(&line)?;
        }
        Ok(())
    }

    /// Fetches what may be kept of a stream.
    fn fetch(&self, stream: usize, frame: &Frame, max: usize) -> Result<Captured, Stop> {
        let size = frame.sizes[stream];
        let begun = &frame.streams[stream];
        let most = max as u64;
        let range = |from: u64, to: u64| -> Result<Vec<u8>, Stop> {
            let mut bytes = Vec::new();
            if from == 0 {
                bytes.extend_from_slice(begun);
            }
            while from + (bytes.len() as u64) < to {
                let at = from + bytes.len() as u64;
                let [piece, _] = self.carry(&self.place.piece_at(stream, at))?.streams;
                if piece.is_empty() {
                    // The guest has made its file shorter.
                    break;
                }
                bytes.extend(piece);
            }
            bytes.truncate(usize::try_from(to - from).unwrap_or(usize::MAX));
            Ok(bytes)
        };
        if size <= most {
            return Ok(Captured {
                head: range(0, size)?,
                ..Captured::default()
            });
        }
        let first = most / 2;
        Ok(Captured {
            head: range(0, first)?,
            dropped: size - most,
            tail: range(size - (most - first), size)?,
        })
    }

    /// Runs a command, whose time is `time`.
    fn run(&self, command: &ActorCommand, time: Duration) -> Result<ActorOutput, Stop> {
        let has_input = !command.stdin.is_empty();
        if has_input {
            self.bring("in", &command.stdin)?;
        }
        let mut env = self.spec.variables(self.spec.user, &command.env);
        if !self.spec.env.contains_key("PATH") && !command.env.contains_key("PATH") {
            // The machine's own.
            env.remove("PATH");
        }
        let cwd = command.cwd.as_deref().unwrap_or(&self.spec.workdir);
        let open_files = self.spec.limits.open_files;
        let mut line = (self.place).run(&command.argv, cwd, &env, open_files, has_input)?;
        if line.len() > MAX_LINE {
            self.bring("run", line.as_bytes())?;
            line = self.place.run_file("run");
        }
        let started = Instant::now();
        let came = self.call(&line, time)?;
        let elapsed = started.elapsed();
        let (ending, frame) = match came {
            Came::Frame(frame) => (Ending::Exited { code: frame.code }, frame),
            Came::Nothing => return Err(Stop::Ended(Ending::TimedOut { limit: time })),
            Came::Words(_) => {
                // The shell around it is gone, too: by the server's clock, or by the guest.
                let ending = match elapsed >= time {
                    true => Ending::TimedOut { limit: time },
                    false => Ending::Exited { code: 128 + 9 },
                };
                (ending, self.carry(&self.place.report("0"))?)
            }
        };
        Ok(ActorOutput {
            ending,
            stdout: self.fetch(0, &frame, command.max_output)?,
            stderr: self.fetch(1, &frame, command.max_output)?,
            elapsed,
        })
    }

    /// Deletes what is of ours in the machine, and ends the session.
    fn close(&self) {
        let mut ended = self.lock();
        if ended.is_none() {
            // It may be gone; then it is nobody's loss.
            let _ = self.call(&self.place.end(), FAREWELL);
        }
        ended.get_or_insert_with(|| Ended::Ours("it was ended".to_owned()));
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Shell for OpenEnvActor {
    fn exec_as(&self, command: &ActorCommand, _user: User) -> Result<ActorOutput, ActorError> {
        transfer::check(command)?;
        let mut ended = self.lock();
        match &*ended {
            Some(Ended::Guests(ending)) => return Ok(ActorOutput::of(ending.clone())),
            Some(Ended::Ours(reason)) => {
                return Err(ActorError::Lost {
                    id: self.id.clone(),
                    reason: reason.clone(),
                });
            }
            None => {}
        }
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let over = Ending::TimedOut {
                limit: self.spec.limits.lifetime,
            };
            *ended = Some(Ended::Guests(over.clone()));
            return Ok(ActorOutput::of(over));
        }
        match self.run(command, command.timeout.min(left)) {
            Ok(output) => Ok(output),
            Err(Stop::Ended(ending)) => {
                *ended = Some(Ended::Guests(ending.clone()));
                Ok(ActorOutput::of(ending))
            }
            // What cannot be asked was not.
            Err(Stop::Failed(error @ ActorError::InvalidSpec { .. })) => Err(error),
            Err(Stop::Failed(error)) => {
                *ended = Some(Ended::Ours(with_causes(&error)));
                Err(error)
            }
        }
    }

    fn root(&self) -> User {
        self.spec.user
    }
}

impl Actor for OpenEnvActor {
    fn id(&self) -> &str {
        &self.id
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
            backend: NAME,
            ability: "keep an actor: OpenEnv's protocol has no such call",
        })
    }

    fn logs(&self) -> String {
        String::new()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        Ok(())
    }
}

impl Drop for OpenEnvActor {
    fn drop(&mut self) {
        self.close();
    }
}
