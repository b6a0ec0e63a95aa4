//! Episodes of agents that are programs of their own: each is given a task and the address of a proxy in
//! front of the engine, and what it leaves as its answer is graded. What the model sampled for it is
//! captured there, and is learned from.

mod lent;
mod program;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fs::OpenOptions;
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::TryLockError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fs_err as fs;
use serde_json::json;
use tokio::sync::oneshot;

use self::lent::{Lending, LentTools};
use self::program::{Ended, Program};
use super::{
    CollectionSeed, CollectorStats, Episode, GroupRequest, RolloutError, RolloutGroup, derive_seed,
    side_by_side,
};
use crate::actor::Scratch;
use crate::chat::{Message, Role};
use crate::engine::{Engine, EngineHandle};
use crate::env::Environment;
use crate::http;
use crate::openai::ServedModel;
use crate::process::find_program;
use crate::proxy::{
    Backend, CallGraph, Capture, Captured, ProxyConfig, RowLabels, TrainingSession, trajectories,
};
use crate::trajectory::{Status, Trajectory};

pub use self::program::Isolation;

/// Where an agent leaves its answer, in its folder.
const ANSWER: &str = "answer";
/// The longest text that Linux takes in a variable.
const MAX_VARIABLE: usize = 100 << 10;
/// The largest answer that is read.
const MAX_ANSWER: u64 = 4 << 20;
/// Time between looks at whether a call of a tool has ended.
const POLL: Duration = Duration::from_millis(5);
/// How long the proxy's answers may take once all agents have ended.
const GRACE: Duration = Duration::from_secs(1);

/// Which program acts, and within which bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentConfig {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Variables that it is given, besides those of its task.
    pub variables: BTreeMap<String, String>,
    /// What keeps it from the rest of the machine.
    pub isolation: Isolation,
    /// Paths that a sandbox shows it, to read, besides the system's.
    pub mounts: Vec<PathBuf>,
    /// Programs at a time.
    pub concurrency: usize,
    /// The longest that an episode may take; what is there then is graded.
    pub timeout: Duration,
    /// Calls of the model in an episode; the next one is answered with a stop. 0 is no limit.
    pub max_model_calls: u64,
    /// The temperature of all calls.
    pub temperature: f64,
    /// Tokens of an answer at the most, and where the agent says nothing of it.
    pub max_new_tokens: usize,
    /// Whether the model thinks where the agent does not say.
    pub enable_thinking: bool,
}

/// Runs the episodes of agents.
#[derive(Debug)]
pub struct AgentCollector<'a> {
    config: &'a AgentConfig,
    model: ServedModel,
    stop: &'a AtomicBool,
}

/// One episode to play.
struct Request {
    group: usize,
    task_id: String,
    sample: u32,
    environment: Box<dyn Environment>,
    seed: u64,
}

impl<'a> AgentCollector<'a> {
    /// Returns a collector whose agents find `model`; once `stop` is true, collections end with
    /// [`RolloutError::Stopped`].
    #[must_use]
    pub fn new(config: &'a AgentConfig, model: ServedModel, stop: &'a AtomicBool) -> Self {
        Self {
            config,
            model,
            stop,
        }
    }

    /// Plays all episodes to their end; `progress` is told how many are done. The engine is the
    /// collection's own: it ends with it.
    ///
    /// An episode may give several rows, which are of one sample: where its agent's history does not only
    /// grow, or where it has others work for it. An agent that ends without a call of the model has
    /// failed by what it is, not by what the policy did, and has no reward; nor has an episode in which a call
    /// failed by no fault of the agent's, whatever it made of that.
    ///
    /// # Errors
    ///
    /// Fails where it is stopped, where the agent cannot be started at all, and where the engine ends.
    pub fn collect(
        &self,
        engine: Engine,
        requests: Vec<GroupRequest>,
        seed: CollectionSeed<'_>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(Vec<RolloutGroup>, CollectorStats), RolloutError> {
        check_program(self.config)?;
        let started = Instant::now();
        let mut groups: Vec<RolloutGroup> = requests
            .iter()
            .map(|request| RolloutGroup {
                task_id: request.task_id.clone(),
                trajectories: Vec::new(),
            })
            .collect();
        let served = Served::start(engine, self.model.clone())?;
        let mut done = 0;
        side_by_side(
            self.config.concurrency,
            episodes(requests, seed),
            || self.stop.load(Ordering::Relaxed) || served.capture().is_stopped(),
            |request| (request.group, self.play(&served, request, seed)),
            |(group, rows)| {
                groups[group].trajectories.extend(rows);
                done += 1;
                progress(done);
            },
        );
        let has_engine = !served.capture().is_stopped();
        drop(served);
        if self.stop.load(Ordering::Relaxed) {
            return Err(RolloutError::Stopped);
        }
        if !has_engine {
            return Err(RolloutError::EngineEnded);
        }
        for group in &mut groups {
            // Rows of one sample stay in the order of their calls.
            group
                .trajectories
                .sort_by_key(|trajectory| trajectory.sample);
        }
        let rows = groups.iter().flat_map(|group| &group.trajectories);
        let sampled = rows.map(|row| row.trace.sampled_len() as u64).sum();
        let stats = CollectorStats {
            sampled_tokens: sampled,
            seconds: started.elapsed().as_secs_f64(),
        };
        Ok((groups, stats))
    }

    /// Plays one episode and returns its rows.
    fn play(&self, served: &Served, request: Request, seed: CollectionSeed<'_>) -> Vec<Trajectory> {
        let Request {
            group,
            task_id,
            sample,
            environment,
            seed: session_seed,
        } = request;
        let group = group as u64;
        let mut episode = Episode::start(environment, &task_id, group, sample, seed.step);
        let lends_tools = episode.lends_tools();
        if lends_tools && !episode.has_failed() {
            // The agent's time begins once there is something to work in.
            episode.open_tools(&|| self.stop.load(Ordering::Relaxed));
        }
        if episode.has_failed() {
            return vec![episode.into_trajectory()];
        }
        let messages = episode.messages().to_vec();
        let lent = Lending::new(episode);
        // Nobody can guess it, so no agent speaks for another.
        let key = http::uuid4();
        let session = TrainingSession {
            temperature: self.config.temperature,
            max_new_tokens: self.config.max_new_tokens,
            enable_thinking: self.config.enable_thinking,
            max_model_calls: self.config.max_model_calls,
            seed: session_seed,
        };
        let capture = served.capture();
        if lends_tools {
            served.tools.lend(&key, &lent);
        }
        let played = (capture.open(&key, session))
            .map_err(std::io::Error::other)
            .and_then(|()| self.run(served.address, &key, &task_id, &messages, lends_tools));
        served.tools.take_back(&key);
        let Some(mut episode) = self.taken_back(&lent) else {
            return Vec::new();
        };
        let Captured {
            graph,
            faults,
            refusals,
        } = capture.close(&key).unwrap_or_default();
        let has_called = graph.calls().next().is_some();
        match played {
            _ if episode.has_failed() => {}
            Ok(_) if faults > 0 => {
                let error = format!("{faults} of the agent's calls failed by a fault of ours");
                episode.fail(&std::io::Error::other(error));
            }
            Ok((_, answer)) if has_called => episode.end(answer.as_deref()),
            Ok((ended, _)) => {
                let how = ended.describe();
                let error = match refusals {
                    0 => format!("the agent did not call the model: {how}"),
                    1 => format!("the agent's only call of the model was refused: {how}"),
                    _ => format!("all {refusals} calls of the agent's were refused: {how}"),
                };
                episode.fail(&std::io::Error::other(error));
            }
            Err(error) => episode.fail(&error),
        }
        rows(&graph, episode.into_trajectory())
    }

    /// Returns an episode that was lent, once a call that is under way has ended; none where nobody waits for that.
    fn taken_back(&self, lent: &Lending) -> Option<Episode> {
        loop {
            match lent.episode.try_lock() {
                Ok(mut episode) => return episode.take(),
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner().take(),
                Err(TryLockError::WouldBlock) if self.stop.load(Ordering::Relaxed) => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(POLL),
            }
        }
    }

    /// Runs the agent and returns how it ended and its answer, if it gave one.
    fn run(
        &self,
        address: SocketAddr,
        key: &str,
        task_id: &str,
        messages: &[Message],
        lends_tools: bool,
    ) -> std::io::Result<(Ended, Option<String>)> {
        let folder = Scratch::new()?;
        let instruction = messages
            .iter()
            .filter(|message| message.role == Role::User)
            .map(|message| message.content.as_str())
            .collect::<Vec<_>>()
            .join("\n\n");
        let task = json!({"task_id": task_id, "instruction": instruction, "messages": messages});
        fs::write(folder.path().join("task.json"), task.to_string())?;
        let program = Program {
            command: &self.config.command,
            isolation: self.config.isolation,
            mounts: &self.config.mounts,
            folder: folder.path(),
            timeout: self.config.timeout,
        };
        let seen = |name: &str| {
            program
                .seen_folder()
                .join(name)
                .to_string_lossy()
                .into_owned()
        };
        let mut variables = self.config.variables.clone();
        variables.extend(
            [
                ("OPENAI_BASE_URL", format!("http://{address}/v1")),
                ("OPENAI_API_KEY", key.to_owned()),
                ("ANTHROPIC_BASE_URL", format!("http://{address}")),
                ("ANTHROPIC_API_KEY", key.to_owned()),
                ("WARDIAN_MODEL", self.model.name.clone()),
                ("WARDIAN_TASK", seen("task.json")),
                ("WARDIAN_ANSWER", seen(ANSWER)),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        if lends_tools {
            let tools = format!("http://{address}{}", lent::PATH);
            variables.insert("WARDIAN_TOOLS".to_owned(), tools);
        }
        if instruction.len() <= MAX_VARIABLE {
            variables.insert("WARDIAN_INSTRUCTION".to_owned(), instruction);
        }
        let ended = program.run(&variables, self.stop)?;
        tracing::debug!(
            task = task_id,
            ended = ended.describe(),
            stdout = %String::from_utf8_lossy(&ended.stdout),
            "an agent ended"
        );
        let answer = read_answer(&folder.path().join(ANSWER))?;
        Ok((ended, answer))
    }
}

/// Checks that what is started is there: the agent, or what it is started in.
fn check_program(config: &AgentConfig) -> Result<(), RolloutError> {
    let (program, remedy) = match config.isolation {
        Isolation::Bubblewrap => (
            "bwrap",
            "install bubblewrap, or let agents do what this user may: `isolation = \"none\"`",
        ),
        Isolation::None => (
            config.command.first().map_or("", String::as_str),
            "correct `command`, or install it",
        ),
    };
    match find_program(Path::new(program)) {
        Some(_) => Ok(()),
        None => Err(RolloutError::AgentNotFound {
            program: program.to_owned(),
            remedy,
        }),
    }
}

/// Returns the episodes of all groups, in their order.
fn episodes(requests: Vec<GroupRequest>, seed: CollectionSeed<'_>) -> VecDeque<Request> {
    let mut episodes = VecDeque::new();
    for (group, request) in requests.into_iter().enumerate() {
        let of_task = seed.of_task(seed.purpose, &request.task_id);
        let of_task = of_task.wrapping_add(request.visit);
        for (sample, environment) in (request.first_sample..).zip(request.environments) {
            episodes.push_back(Request {
                group,
                task_id: request.task_id.clone(),
                sample,
                environment,
                seed: derive_seed(of_task, "agent", u64::from(sample), ""),
            });
        }
    }
    episodes
}

/// Reads what an agent left; what is no file of its own is not followed, wherever it leads.
fn read_answer(path: &Path) -> std::io::Result<Option<String>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let file = match file {
        Ok(file) => file,
        Err(error) => {
            // What the agent can bring about by what it leaves there; anything else is the machine's.
            let by_agent = [
                libc::ENOENT,
                libc::ENOTDIR,
                libc::ELOOP,
                libc::EACCES,
                libc::ENXIO,
            ];
            return match error.raw_os_error() {
                Some(code) if by_agent.contains(&code) => Ok(None),
                _ => Err(error),
            };
        }
    };
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(MAX_ANSWER).read_to_end(&mut bytes)?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Returns the rows of an episode, each with its score; itself where nothing of it can be learned from.
fn rows(graph: &CallGraph, episode: Trajectory) -> Vec<Trajectory> {
    let labels = RowLabels {
        task_id: episode.task_id.clone(),
        group: episode.group,
        sample: episode.sample,
        policy_step: episode.policy_step,
        reward: episode.reward,
    };
    let mut rows = trajectories(graph, &labels);
    if rows.is_empty() {
        return vec![episode];
    }
    for row in &mut rows {
        if let Status::Failed { .. } = &episode.status {
            row.status = episode.status.clone();
        }
        row.rewards.clone_from(&episode.rewards);
        row.passed = episode.passed;
        row.usage.start_seconds = episode.usage.start_seconds;
        row.usage.tool_seconds = episode.usage.tool_seconds;
        row.usage.commands_timed_out = episode.usage.commands_timed_out;
        row.usage.actors_lost = episode.usage.actors_lost;
        row.usage.grade_seconds = episode.usage.grade_seconds;
        row.usage.fuel = episode.usage.fuel;
    }
    rows
}

/// The engine behind a proxy on a port of its own, for as long as this lives.
struct Served {
    address: SocketAddr,
    tools: LentTools,
    /// Taken when it ends.
    capture: Option<Capture>,
    stop: Option<oneshot::Sender<()>>,
    /// The proxy's thread, then the engine's.
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Served {
    fn start(engine: Engine, model: ServedModel) -> Result<Self, RolloutError> {
        let (engine, thread) = EngineHandle::start(engine, usize::MAX)?;
        Self::over(Backend::Engine { engine, model }, Some(thread))
    }

    /// Serves what `backend` answers; its thread ends once nobody can ask it.
    fn over(
        backend: Backend,
        thread: Option<std::thread::JoinHandle<()>>,
    ) -> Result<Self, RolloutError> {
        let capture = Capture::new(backend, ProxyConfig::default());
        let tools = LentTools::default();
        let router = capture.router().merge(tools.router());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let proxy_thread = std::thread::Builder::new()
            .name("capture".to_owned())
            .spawn(move || {
                let stopped = async {
                    let _ = stopped.await;
                };
                runtime.block_on(http::serve(listener, router, stopped, GRACE));
                // Calls that nobody waits for any more are not waited for either.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            address,
            tools,
            capture: Some(capture),
            stop: Some(stop),
            threads: [proxy_thread].into_iter().chain(thread).collect(),
        })
    }
}

impl Served {
    fn capture(&self) -> &Capture {
        self.capture
            .as_ref()
            .expect("it is taken when this is dropped")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        // The engine's thread ends once nobody can ask it.
        drop(self.capture.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
