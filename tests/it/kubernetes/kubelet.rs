//! Runs the pods of the server: each is a real sandbox of gVisor.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use wardian::actor::runsc::{RunscBackend, RunscOptions};
use wardian::actor::{
    Actor, ActorBackend as _, ActorCommand, ActorLimits, ActorSpec, Ending, RootFs, User,
};

use super::server::Cluster;
use super::store::POD;

/// The image that is always there: the programs of this machine. Those that are built have them, too.
pub(super) const IMAGE: &str = "registry.example.org/host:1";
/// What that image says `PATH` is.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A pod that runs.
#[derive(Debug)]
struct Running {
    actor: Box<dyn Actor>,
    user: User,
    env: BTreeMap<String, String>,
}

/// The node.
#[derive(Debug)]
pub(super) struct Kubelet {
    backend: RunscBackend,
    pub(super) base: tempfile::TempDir,
    /// What the image has besides: folders of this machine, and where they are in it.
    pub(super) content: Mutex<Vec<(PathBuf, PathBuf)>>,
    running: Mutex<BTreeMap<String, Option<Arc<Running>>>>,
}

impl Kubelet {
    pub(super) fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let options = RunscOptions {
            folder: Some(base.path().to_owned()),
            ..RunscOptions::default()
        };
        let backend = RunscBackend::open(&options)
            .unwrap_or_else(|error| panic!("{error}\nhint: apt-get install -y runsc"));
        Self {
            backend,
            base,
            content: Mutex::default(),
            running: Mutex::default(),
        }
    }

    /// Returns the names of the pods that have a sandbox.
    pub(super) fn sandboxes(&self) -> Vec<String> {
        self.running.lock().unwrap().keys().cloned().collect()
    }

    /// Ends a pod's sandbox.
    pub(super) fn kill(&self, pod: &str) {
        let found = self.running.lock().unwrap().remove(pod).flatten();
        drop(found);
    }

    /// Returns the program that runs another one in a pod's sandbox.
    pub(super) fn program(&self, pod: &str, argv: &[String]) -> Option<Command> {
        let running = self.running.lock().unwrap().get(pod)?.clone()?;
        let mut all = ["/.wardian/helper", "exec", "/"]
            .map(str::to_owned)
            .to_vec();
        all.extend(argv.iter().cloned());
        let variables = running.env.iter();
        let variables: Vec<String> = variables
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let process = json!({
            "user": { "uid": running.user.uid, "gid": running.user.gid },
            "args": all, "env": variables, "cwd": "/",
            "capabilities": { "bounding": [], "effective": [], "permitted": [], "inheritable": [] },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": 1024, "hard": 4096 }],
        });
        let file = self
            .base
            .path()
            .join(format!("exec-{:016x}.json", rand::random::<u64>()));
        fs_err::write(&file, process.to_string()).unwrap();
        let mut command = Command::new("runsc");
        command
            .arg(format!("--root={}", self.state().display()))
            .args([
                "--platform=ptrace",
                "--network=none",
                "--ignore-cgroups",
                "--overlay2=all:memory",
                "exec",
            ])
            .arg(format!("--process={}", file.display()))
            .arg(running.actor.id())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Some(command)
    }

    fn state(&self) -> PathBuf {
        let folders = fs_err::read_dir(self.base.path()).unwrap();
        let states = folders.map(|entry| entry.unwrap().path().join("state"));
        states.into_iter().find(|state| state.is_dir()).unwrap()
    }

    /// Says in the status what became of a pod whose program ended with an error.
    pub(super) fn look(&self, cluster: &Cluster, pod: &str) {
        let Some(Some(running)) = self.running.lock().unwrap().get(pod).cloned() else {
            return;
        };
        let ending = match running.actor.exec(&ActorCommand::new(["true"])) {
            Ok(output) => output.ending,
            Err(error) => Ending::Killed {
                reason: error.to_string(),
            },
        };
        let message = format!("{ending:?}");
        let reason = match ending {
            Ending::Exited { .. } => return,
            Ending::OutOfMemory { .. } => "OOMKilled",
            _ => "Error",
        };
        cluster.store().update(&POD, pod, |object| {
            object["status"] = json!({ "phase": "Failed", "containerStatuses": [{
                "name": "main", "state": { "terminated": { "reason": reason, "exitCode": 137, "message": message } },
            }] });
        });
    }

    /// Starts the pods that have no sandbox, and ends the sandboxes that have no pod.
    pub(super) fn reconcile(&self, cluster: &Arc<Cluster>) {
        let pods = cluster.store().list(&POD);
        let name = |pod: &Value| pod["metadata"]["name"].as_str().unwrap().to_owned();
        let names: Vec<String> = pods.iter().map(name).collect();
        let gone: Vec<String> = self
            .sandboxes()
            .into_iter()
            .filter(|name| !names.contains(name))
            .collect();
        for pod in gone {
            self.kill(&pod);
        }
        for pod in pods {
            let is_new = pod["status"]["phase"].is_null();
            let fresh = name(&pod);
            let image = pod["spec"]["containers"][0]["image"].as_str().unwrap();
            if !is_new || !cluster.has_image(image) {
                continue;
            }
            let mut running = self.running.lock().unwrap();
            if running.contains_key(&fresh) {
                continue;
            }
            running.insert(fresh.clone(), None);
            drop(running);
            let cluster = Arc::clone(cluster);
            std::thread::spawn(move || {
                let started = Arc::new(cluster.kubelet.start(&pod));
                let mut running = cluster.kubelet.running.lock().unwrap();
                // It may have been deleted meanwhile.
                if let Some(place) = running.get_mut(&fresh) {
                    *place = Some(started);
                    drop(running);
                    cluster.store().update(&POD, &fresh, |object| {
                        object["status"] = json!({ "phase": "Running", "containerStatuses": [
                            { "name": "main", "ready": true, "state": { "running": {} } },
                        ] });
                    });
                }
            });
        }
    }

    /// Starts the sandbox of a pod and fills its volumes as its first container says.
    fn start(&self, pod: &Value) -> Running {
        let spec = &pod["spec"];
        let main = &spec["containers"][0];
        let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
        let user = User {
            uid: number(&spec["securityContext"]["runAsUser"]),
            gid: number(&spec["securityContext"]["runAsGroup"]),
        };
        let mounts = |container: &Value| -> Vec<PathBuf> {
            let mounts = container["volumeMounts"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            mounts
                .iter()
                .map(|mount| mount["mountPath"].as_str().unwrap().into())
                .collect()
        };
        let fill = &spec["initContainers"][0];
        let (filled, mounted) = (mounts(fill), mounts(main));
        let mut env = BTreeMap::from([("PATH".to_owned(), PATH.to_owned())]);
        for variable in main["env"].as_array().unwrap() {
            let value = variable["value"].as_str().unwrap().replace("$$", "$");
            env.insert(variable["name"].as_str().unwrap().to_owned(), value);
        }
        let bytes = |name: &str| {
            main["resources"]["limits"][name]
                .as_str()
                .unwrap()
                .parse()
                .unwrap()
        };
        let actor = self
            .backend
            .create(&ActorSpec {
                mounts: self.content.lock().unwrap().clone(),
                writable: filled.clone(),
                workdir: "/run/pod".into(),
                user,
                limits: ActorLimits {
                    memory: bytes("memory"),
                    disk: bytes("ephemeral-storage"),
                    cpu_millis: 1000,
                    processes: 64,
                    open_files: 4096,
                    lifetime: Duration::from_secs(3600),
                },
                ..ActorSpec::new(RootFs::Host)
            })
            .unwrap();
        if let Some(argv) = fill["command"].as_array() {
            let argv = argv
                .iter()
                .map(|word| word.as_str().unwrap().replace("$$", "$"));
            let command = ActorCommand {
                cwd: Some("/".into()),
                ..ActorCommand::new(argv)
            };
            assert!(actor.exec(&command).unwrap().is_success());
        }
        for (from, to) in filled.iter().zip(&mounted) {
            mount(&*actor, from, to);
        }
        Running { actor, user, env }
    }
}

/// What is in a volume takes the place of what is in a folder.
fn mount(actor: &dyn Actor, from: &Path, to: &Path) {
    let (from, to) = (from.display(), to.display());
    let script = format!("rm -rf {to} && mkdir -p $(dirname {to}) && cp -a {from} {to}");
    let command = ActorCommand {
        user: Some(User::default()),
        cwd: Some("/".into()),
        ..ActorCommand::shell(script)
    };
    let output = actor.exec(&command).unwrap();
    assert!(output.is_success(), "{output:?}");
}
