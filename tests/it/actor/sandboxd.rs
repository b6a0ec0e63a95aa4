//! Machines that are reached through the server inside them: `wardian sandboxd` as the first process of
//! namespaces of its own, as a plain process, and inside of gVisor.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::time::{Duration, Instant};

use wardian::actor::sandboxd::{BearerToken, SandboxdActor, SandboxdOptions};
use wardian::actor::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec,
    Capabilities, Ending, FileTree, TreeLimits,
};

use super::{Scene, processes_naming, runsc, sh, spec, text};

pub(crate) const TOKEN: &str = "a-token-of-the-tests";

/// Starts machines whose first process is the server.
#[derive(Debug)]
pub(crate) struct Machines {
    token: PathBuf,
}

pub(crate) fn sandboxd() -> Scene<Machines> {
    let base = tempfile::tempdir().unwrap();
    Scene {
        backend: Some(Machines::new(base.path())),
        base,
    }
}

impl Machines {
    /// Keeps the token in `folder`.
    pub(crate) fn new(folder: &Path) -> Self {
        let token = folder.join("token");
        fs_err::write(&token, TOKEN).unwrap();
        Self { token }
    }

    /// Starts one in namespaces of its own, but for the network.
    pub(crate) fn start(&self) -> Machine {
        self.start_with(&[])
    }

    /// As [`Self::start`], with the folders `tmp` and `workspace` of `folder`.
    #[cfg(feature = "k8s")]
    pub(crate) fn start_over(&self, folder: &Path) -> Machine {
        let here = |name: &str| folder.join(name).to_string_lossy().into_owned();
        let (tmp, workspace) = (here("tmp"), here("workspace"));
        self.start_with(&["--bind", &tmp, "/tmp", "--bind", &workspace, "/workspace"])
    }

    fn start_with(&self, more: &[&str]) -> Machine {
        let mut command = Command::new("bwrap");
        command.args("--unshare-pid --as-pid-1 --die-with-parent --cap-add ALL".split(' '));
        command.args("--ro-bind /usr /usr --ro-bind /etc /etc --proc /proc --dev /dev".split(' '));
        command.args("--symlink usr/bin /bin --symlink usr/sbin /sbin".split(' '));
        command.args("--symlink usr/lib /lib --symlink usr/lib64 /lib64".split(' '));
        command
            .args("--tmpfs /tmp --dir /root --chdir /".split(' '))
            .args(more);
        command.args(["--ro-bind", env!("CARGO_BIN_EXE_wardian"), "/wardian"]);
        command.arg("--ro-bind").arg(&self.token).arg("/token");
        command.args(["/wardian", "sandboxd", "--token-file", "/token"]);
        Machine::start(command)
    }

    /// Starts the server as a process of this machine.
    fn start_plain(&self) -> Machine {
        self.start_plain_with(&[])
    }

    /// As [`Self::start_plain`], with further arguments.
    pub(crate) fn start_plain_with(&self, more: &[&str]) -> Machine {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wardian"));
        command.args(["sandboxd", "--grace", "200ms", "--token-file"]);
        command.arg(&self.token).args(more);
        Machine::start(command)
    }
}

/// A server that is ended when this is dropped.
#[derive(Debug)]
pub(crate) struct Machine {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Machine {
    fn start(mut command: Command) -> Self {
        command
            .args(["--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = spawn(command)
            .unwrap_or_else(|error| panic!("{error}\nhint: apt-get install -y bubblewrap"));
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        let address = line.trim().rsplit_once("://").map(|(_, address)| address);
        let address = address.unwrap_or_else(|| panic!("the server says: {line}"));
        let address = address.parse().unwrap();
        // What it says further is not to be in its way.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Self { child, address }
    }

    pub(crate) fn options(&self) -> SandboxdOptions {
        options(self.address)
    }

    /// Returns the processes of this machine's that are below the one that was started.
    #[cfg(feature = "k8s")]
    pub(crate) fn processes(&self) -> Vec<u32> {
        let mut found = Vec::new();
        let mut parents = vec![self.child.id()];
        while let Some(parent) = parents.pop() {
            let listed = fs_err::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
            let children = listed.unwrap_or_default();
            let children = children
                .split_whitespace()
                .map(|pid| pid.parse::<u32>().unwrap());
            parents.extend(children.clone());
            found.extend(children);
        }
        found
    }

    fn connect(&self) -> SandboxdActor {
        SandboxdActor::connect(&self.options(), &spec()).unwrap()
    }
}

/// Starts a program on a thread that stays: namespaces that die with their parent die with the thread that started them.
fn spawn(command: Command) -> std::io::Result<Child> {
    type Job = (Command, mpsc::Sender<std::io::Result<Child>>);
    static THREAD: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in jobs {
                answer.send(command.spawn()).unwrap_or_default();
            }
        });
        sender
    });
    let (answer, started) = mpsc::channel();
    THREAD.send((command, answer)).unwrap();
    started.recv().unwrap()
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options(address: SocketAddr) -> SandboxdOptions {
    SandboxdOptions {
        patience: Duration::from_secs(10),
        ready_timeout: Duration::from_secs(30),
        ..SandboxdOptions::new(
            format!("http://{address}"),
            BearerToken::new(TOKEN).unwrap(),
        )
    }
}

/// An actor and the machine that it is in.
#[derive(Debug)]
struct Inside {
    actor: Box<SandboxdActor>,
    machine: Machine,
}

impl ActorBackend for Machines {
    fn name(&self) -> &'static str {
        "sandboxd"
    }

    fn capabilities(&self) -> Capabilities {
        // What the cases ask for: users have rights of their own, as under gVisor.
        runsc_capabilities()
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        let machine = self.start();
        let actor = Box::new(SandboxdActor::connect(&machine.options(), spec)?);
        Ok(Box::new(Inside { actor, machine }))
    }
}

fn runsc_capabilities() -> Capabilities {
    let scene = runsc();
    let capabilities = scene.backend().capabilities();
    scene.close();
    capabilities
}

impl Actor for Inside {
    fn id(&self) -> &str {
        self.actor.id()
    }

    fn spec(&self) -> &ActorSpec {
        self.actor.spec()
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        self.actor.exec(command)
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        self.actor.put(folder, tree)
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        self.actor.get(path, limits)
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        self.actor.snapshot()
    }

    fn logs(&self) -> String {
        self.actor.logs()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        let Self { actor, machine } = *self;
        actor.destroy()?;
        drop(machine);
        Ok(())
    }
}

/// Sends what is given, and returns the whole answer.
fn raw(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

pub(super) fn ask(address: SocketAddr, line: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    raw(
        address,
        &format!(
            "{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        ),
    )
}

pub(super) fn authorized(headers: &str) -> String {
    format!("Authorization: Bearer {TOKEN}\r\n{headers}")
}

fn exec_body(script: &str) -> String {
    let line = serde_json::json!({
        "argv": ["/bin/sh", "-c", script], "env": {}, "cwd": "/", "uid": 0, "gid": 0,
        "timeout_ms": 60_000, "max_output": 1000, "stdin": 0,
    });
    format!("{line}\n")
}

#[test]
fn only_who_has_the_token_is_served() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    for path in ["/healthz", "/readyz"] {
        let answer = ask(machine.address, &format!("GET {path}"), "", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let wrong = "Authorization: Bearer a-token-of-the-testz\r\n";
    for headers in ["", wrong] {
        for line in [
            "POST /v1/claim",
            "POST /v1/exec",
            "GET /v1/turn",
            "GET /v1/tree?path=/etc&bytes=1&entries=1",
            "PUT /v1/tree?path=/tmp/x&uid=0&gid=0",
            "POST /v1/release",
        ] {
            let answer = ask(machine.address, line, headers, r#"{"claim":"c"}"#);
            assert!(answer.starts_with("HTTP/1.1 401"), "{line}: {answer}");
        }
    }
    let token = BearerToken::new("another-token-of-16").unwrap();
    let options = SandboxdOptions {
        token,
        ..machine.options()
    };
    let error = SandboxdActor::connect(&options, &spec()).unwrap_err();
    assert!(matches!(error, ActorError::Unusable { .. }), "{error}");
    // With the token it is the same request that is let in.
    let headers = authorized("");
    let answer = ask(
        machine.address,
        "POST /v1/claim",
        &headers,
        r#"{"claim":"c"}"#,
    );
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(machine);
    scene.close();
}

#[test]
fn a_turn_is_taken_once() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    let headers = |turn| {
        authorized(&format!(
            "x-sandboxd-claim: c\r\nx-sandboxd-turn: {turn}\r\n"
        ))
    };
    let claim = |name: &str| {
        let body = format!(r#"{{"claim":"{name}"}}"#);
        ask(machine.address, "POST /v1/claim", &authorized(""), &body)
    };
    let exec = |turn, script| {
        ask(
            machine.address,
            "POST /v1/exec",
            &headers(turn),
            &exec_body(script),
        )
    };
    assert!(exec(1, "true").contains("lost"), "nothing is claimed");
    claim("c");
    let first = exec(1, "echo ran; echo x >> /tmp/ran");
    assert!(
        first.starts_with("HTTP/1.1 200") && first.ends_with("ran\n"),
        "{first}"
    );
    let again = exec(1, "echo ran; echo x >> /tmp/ran");
    assert!(
        again.starts_with("HTTP/1.1 409") && again.contains("taken"),
        "{again}"
    );
    let kept = ask(machine.address, "GET /v1/turn", &headers(1), "");
    assert!(kept.ends_with("ran\n"), "{kept}");
    assert!(exec(3, "true").contains("lost"), "a turn is missing");
    assert!(exec(2, "cat /tmp/ran").ends_with("\nx\n"), "it ran once");
    // Who claims it again by the same name changes nothing, another one does.
    claim("c");
    assert!(exec(3, "true").starts_with("HTTP/1.1 200"));
    claim("d");
    assert!(exec(4, "true").contains("lost"));
    drop(machine);
    scene.close();
}

#[test]
fn requests_are_bounded_and_checked() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    ask(
        machine.address,
        "POST /v1/claim",
        &authorized(""),
        r#"{"claim":"c"}"#,
    );
    let headers = authorized("x-sandboxd-claim: c\r\nx-sandboxd-turn: 1\r\n");
    let good = exec_body("true");
    for (body, why) in [
        (good.replace("\"stdin\":0", "\"stdin\":9"), "input"),
        (
            good.replace("\"cwd\":\"/\"", "\"cwd\":\"../etc\""),
            "absolute",
        ),
        (
            good.replace("\"max_output\":1000", "\"max_output\":999999999"),
            "at most",
        ),
        (good.replace("[\"/bin/sh\"", "[\"\""), "program"),
        ("no JSON\n".to_owned(), "command"),
        ("{".repeat(100_000), "command"),
    ] {
        let answer = ask(machine.address, "POST /v1/exec", &headers, &body);
        assert!(
            answer.starts_with("HTTP/1.1 400") && answer.contains(why),
            "{answer}"
        );
    }
    let traversal = ask(
        machine.address,
        "PUT /v1/tree?path=/tmp/../etc&uid=0&gid=0",
        &headers,
        "",
    );
    assert!(traversal.starts_with("HTTP/1.1 400"), "{traversal}");
    // An archive that leaves its folder: it is read, and refused for that.
    let forged = tar_of("../../../tmp/forged");
    let answer = {
        let mut stream = TcpStream::connect(machine.address).unwrap();
        let head = format!(
            "PUT /v1/tree?path=/tmp/in&uid=0&gid=0 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
             Content-Length: {}\r\n{headers}\r\n",
            forged.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&forged).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(
        answer.starts_with("HTTP/1.1 422") && answer.contains("leads out of it"),
        "{answer}"
    );
    let headers = authorized("x-sandboxd-claim: c\r\nx-sandboxd-turn: 2\r\n");
    let looked = ask(
        machine.address,
        "POST /v1/exec",
        &headers,
        &exec_body("ls /tmp /tmp/in 2>&1"),
    );
    assert!(!looked.contains("forged"), "{looked}");
    drop(machine);
    scene.close();
}

/// Returns an archive with one empty file of that name.
fn tar_of(name: &str) -> Vec<u8> {
    let mut header = [0_u8; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000644");
    for at in [108, 116] {
        header[at..at + 7].copy_from_slice(b"0000000");
    }
    header[124..135].copy_from_slice(b"00000000000");
    header[136..147].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar  \0");
    header[148..156].copy_from_slice(b"        ");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = header.to_vec();
    archive.resize(3 * 512, 0);
    archive
}

#[test]
fn what_is_left_behind_is_buried_and_ended() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    let actor = machine.connect();
    // Orphans that end: the first process buries them.
    text(
        &actor,
        "for i in 1 2 3; do (sleep 0.0$i &) ; done; sleep 0.3",
    );
    let states = "sleep 0.1; for f in /proc/[0-9]*/stat; do sed 's/.*) //' $f | cut -c1; done";
    assert!(!text(&actor, states).contains('Z'), "there are zombies");
    // What stays goes on after its command, and ends with the claim.
    text(
        &actor,
        "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo",
    );
    let counted = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '^.*sleep 1000' || true";
    assert_eq!(text(&actor, counted), "1");
    Box::new(actor).destroy().unwrap();
    let other = machine.connect();
    let counted = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -c '^sleep' || true";
    assert_eq!(text(&other, counted), "0");
    drop(other);
    drop(machine);
    scene.close();
}

#[test]
fn who_is_quick_does_not_get_away() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    let actor = machine.connect();
    // Each starts the next in a session of its own and ends.
    let runner = "f() { setsid sh -c \"$F\" & }; export F='echo >> /tmp/n; setsid sh -c \"$F\" &'; f; f; f; sleep 1000";
    let command = ActorCommand {
        timeout: Duration::from_millis(500),
        ..ActorCommand::shell(runner)
    };
    actor.exec(&command).unwrap();
    let count = || text(&actor, "wc -l < /tmp/n").parse::<u64>().unwrap();
    let ran = count();
    assert!(ran > 3, "they were not quick: {ran}");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(count(), ran, "one got away");
    drop(actor);
    drop(machine);
    scene.close();
}

#[test]
fn a_stop_ends_what_runs() {
    let scene = sandboxd();
    let mut machine = scene.backend().start_plain();
    let folder = tempfile::tempdir().unwrap();
    let spec = ActorSpec {
        workdir: folder.path().join("work"),
        ..spec()
    };
    let options = SandboxdOptions {
        patience: Duration::from_secs(1),
        ..machine.options()
    };
    let actor = SandboxdActor::connect(&options, &spec).unwrap();
    let name = format!("1000.{}", std::process::id());
    std::thread::scope(|scope| {
        let run = scope.spawn(|| actor.exec(&ActorCommand::shell(format!("setsid sleep {name}"))));
        let started = Instant::now();
        while processes_naming(&format!("sleep {name}")).is_empty() {
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "it did not start"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = i32::try_from(machine.child.id()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(machine.child.wait().unwrap().success());
        let error = run.join().unwrap().unwrap_err();
        assert!(!error.is_guests_doing(), "{error}");
        assert_eq!(processes_naming(&format!("sleep {name}")), [""; 0]);
    });
    // Nothing goes on as if.
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(!error.is_guests_doing(), "{error}");
    drop(actor);
    drop(machine);
    scene.close();
}

#[test]
fn a_server_that_was_put_back_is_told_from_one_that_goes_on() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    let actor = machine.connect();
    text(&actor, "true");
    // As after a crash: the server is there, and knows nothing of this.
    let other = machine.connect();
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(
        error.to_string().contains("what was there is lost"),
        "{error}"
    );
    assert!(!error.is_guests_doing(), "{error}");
    text(&other, "true");
    drop((actor, other, machine));
    scene.close();
}

/// What a router does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Pass,
    /// Answers itself.
    Answer(&'static str),
    /// Delivers it, and loses the answer.
    Lose,
}

/// A router in front of a server, which does with each request what is next in its list.
struct Router {
    address: SocketAddr,
    seen: Arc<AtomicUsize>,
    next: Arc<Mutex<Vec<Does>>>,
}

impl Router {
    fn start(upstream: impl Fn(Vec<u8>) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let router = Self {
            address: listener.local_addr().unwrap(),
            seen: Arc::default(),
            next: Arc::default(),
        };
        let (seen, next, upstream) = (
            Arc::clone(&router.seen),
            Arc::clone(&router.next),
            Arc::new(upstream),
        );
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, upstream) = (stream.unwrap(), Arc::clone(&upstream));
                let request = read_request(&mut stream);
                seen.fetch_add(1, Ordering::Relaxed);
                let mut next = next.lock().unwrap();
                let does = if next.is_empty() {
                    Does::Pass
                } else {
                    next.remove(0)
                };
                drop(next);
                std::thread::spawn(move || match does {
                    Does::Pass => stream.write_all(&upstream(request)).unwrap_or_default(),
                    Does::Answer(answer) => stream.write_all(answer.as_bytes()).unwrap_or_default(),
                    Does::Lose => drop(upstream(request)),
                });
            }
        });
        router
    }

    fn does(&self, next: &[Does]) {
        *self.next.lock().unwrap() = next.to_vec();
        self.seen.store(0, Ordering::Relaxed);
    }

    fn seen(&self) -> usize {
        self.seen.load(Ordering::Relaxed)
    }
}

/// Reads a request with a length, and has its connection end with it.
pub(crate) fn read_request(stream: &mut TcpStream) -> Vec<u8> {
    let mut reader = BufReader::new(stream);
    let mut request = b"".to_vec();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            request.extend_from_slice(b"connection: close\r\n\r\n");
            break;
        }
        request.extend_from_slice(line.as_bytes());
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    request.extend_from_slice(&body);
    request
}

fn forward(address: SocketAddr) -> impl Fn(Vec<u8>) -> Vec<u8> {
    move |request| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&request).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap_or_default();
        answer
    }
}

const STALE: &str = "HTTP/1.1 421 M\r\nX-Ate-Assignment-Stale: true\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const PLAIN_421: &str = "HTTP/1.1 421 M\r\nContent-Length: 5\r\nConnection: close\r\n\r\nother";
const BUSY: &str =
    "HTTP/1.1 503 S\r\nContent-Length: 28\r\nConnection: close\r\n\r\nno free workers available...";
const LATE: &str = "HTTP/1.1 504 G\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const DENIED: &str = "HTTP/1.1 403 F\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

#[test]
fn requests_are_sent_again_and_done_once() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    let router = Router::start(forward(machine.address));
    let actor = SandboxdActor::connect(&options(router.address), &spec()).unwrap();
    for (number, next) in [
        &[Does::Answer(STALE), Does::Answer(STALE), Does::Pass][..],
        &[Does::Answer(BUSY), Does::Pass],
        &[Does::Answer(LATE), Does::Pass],
        // Delivered, and the answer is lost, twice.
        &[Does::Lose, Does::Lose, Does::Pass],
        // Delivered, and something says that it was not.
        &[
            Does::Lose,
            Does::Answer(BUSY),
            Does::Answer(STALE),
            Does::Pass,
        ],
    ]
    .into_iter()
    .enumerate()
    {
        router.does(next);
        let script = format!("echo {number} | tee -a /tmp/ran");
        assert_eq!(text(&actor, &script), number.to_string(), "{next:?}");
        assert!(router.seen() >= next.len(), "{next:?} was not done");
    }
    router.does(&[]);
    assert_eq!(text(&actor, "cat /tmp/ran"), "0\n1\n2\n3\n4");
    // A tree goes in once, too.
    router.does(&[Does::Lose, Does::Pass]);
    let tree = FileTree::of_file("a", *b"x").unwrap();
    actor.put(Path::new("/tmp/tree"), &tree).unwrap();
    router.does(&[Does::Answer(BUSY), Does::Lose, Does::Pass]);
    let back = actor
        .get(Path::new("/tmp/tree"), TreeLimits::default())
        .unwrap();
    assert_eq!(back, tree);
    for refusal in [PLAIN_421, DENIED] {
        let actor = SandboxdActor::connect(&options(router.address), &spec()).unwrap();
        router.does(&[Does::Answer(refusal)]);
        let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
        assert_eq!(router.seen(), 1, "it was asked again: {error}");
        assert!(!error.is_guests_doing(), "{error}");
    }
    drop(actor);
    drop(machine);
    scene.close();
}

#[test]
fn a_command_outlives_the_wait_of_a_request() {
    let scene = sandboxd();
    let machine = scene.backend().start();
    let router = Router::start(forward(machine.address));
    let actor = SandboxdActor::connect(&options(router.address), &spec()).unwrap();
    router.does(&[]);
    // Longer than a request is held, with an answer lost in between.
    router.does(&[Does::Pass, Does::Lose]);
    let output = sh(&actor, "sleep 12; echo done");
    assert_eq!(output.stdout.text(), "done\n", "{output:?}");
    assert!(router.seen() >= 3, "it was one request");
    drop(actor);
    drop(machine);
    scene.close();
}

#[test]
fn an_answer_is_not_trusted() {
    let answer = |body: &[u8], status: &str| {
        let head = format!(
            "HTTP/1.1 {status}\r\nx-sandboxd: 1\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        [head.as_bytes(), body].concat()
    };
    let router = Router::start(move |request| {
        let request = String::from_utf8_lossy(&request).into_owned();
        let line = request.lines().next().unwrap_or_default();
        match line.split(' ').nth(1).unwrap_or_default() {
            "/v1/claim" => answer(br#"{"protocol":1,"version":"x"}"#, "200 OK"),
            "/v1/exec" => answer(b"{\"end\":{\"how\":\"exited\",\"code\":0},\"stdout\":{\"head\":9,\"dropped\":0,\"tail\":0},\"stderr\":{\"head\":0,\"dropped\":0,\"tail\":0},\"elapsed_ms\":1}\nxx", "200 OK"),
            _ if line.starts_with("GET /v1/tree") && line.contains("large") => {
                answer(&vec![0; 300_000], "200 OK")
            }
            _ if line.starts_with("GET /v1/tree") => answer(&tar_of("../../etc/forged"), "200 OK"),
            _ => answer(b"", "204 No Content"),
        }
    });
    let actor = SandboxdActor::connect(&options(router.address), &spec()).unwrap();
    let limits = TreeLimits {
        bytes: 1000,
        entries: 10,
    };
    let error = actor.get(Path::new("/workspace/x"), limits).unwrap_err();
    assert!(error.to_string().contains("leads out of it"), "{error}");
    let error = actor
        .get(Path::new("/workspace/large"), limits)
        .unwrap_err();
    assert!(error.to_string().contains("more than"), "{error}");
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(error.to_string().contains("no sense"), "{error}");
}

/// A container of gVisor's whose first process is the server.
struct Container {
    folder: tempfile::TempDir,
}

impl Container {
    fn start() -> Self {
        let container = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let folder = container.folder.path();
        fs_err::write(folder.join("token"), TOKEN).unwrap();
        let all = [
            "CAP_CHOWN",
            "CAP_DAC_OVERRIDE",
            "CAP_FOWNER",
            "CAP_KILL",
            "CAP_SETGID",
            "CAP_SETUID",
        ];
        let namespaces = ["pid", "network", "ipc", "uts", "mount"];
        let config = serde_json::json!({
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [
                    env!("CARGO_BIN_EXE_wardian"), "sandboxd", "--listen", "127.0.0.1:80", "--token-file",
                    folder.join("token"),
                ],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
                "capabilities": {"bounding": all, "effective": all, "permitted": all},
            },
            "root": {"path": "/", "readonly": false},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {"namespaces": namespaces.map(|kind| serde_json::json!({"type": kind}))},
        });
        fs_err::write(folder.join("config.json"), config.to_string()).unwrap();
        let log = fs_err::File::create(folder.join("log"))
            .unwrap()
            .into_file();
        let status = container
            .runsc(&[
                "run",
                "--detach",
                "--bundle",
                &folder.to_string_lossy(),
                "server",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .status()
            .unwrap_or_else(|error| panic!("{error}\nhint: apt-get install -y runsc"));
        assert!(status.success(), "{}", container.log());
        container
    }

    fn log(&self) -> String {
        fs_err::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn runsc(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("runsc");
        command
            .arg(format!(
                "--root={}",
                self.folder.path().join("state").display()
            ))
            .args([
                "--platform=ptrace",
                "--network=none",
                "--ignore-cgroups",
                "--overlay2=all:memory",
            ])
            .args(arguments);
        command
    }

    /// Carries a request: there is no network, so a program inside does it.
    fn carry(&self, request: &[u8]) -> Vec<u8> {
        let relay = "import socket, sys, time\nfor _ in range(300):\n  try: s = socket.create_connection(('127.0.0.1', 80)); break\n\
                     \x20 except OSError: time.sleep(0.1)\ns.sendall(sys.stdin.buffer.read())\n\
                     while d := s.recv(65536): sys.stdout.buffer.write(d)";
        let mut relay = self
            .runsc(&["exec", "server", "/usr/bin/python3", "-c", relay])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        relay.stdin.take().unwrap().write_all(request).unwrap();
        relay.wait_with_output().unwrap().stdout
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.runsc(&["delete", "--force", "server"]).status();
    }
}

#[test]
fn it_is_the_first_process_inside_of_gvisor() {
    let container = Arc::new(Container::start());
    let carrier = Arc::downgrade(&container);
    let router = Router::start(move |request| {
        let container = carrier.upgrade();
        container.map_or_else(Vec::new, |container| container.carry(&request))
    });
    let inside = ActorSpec {
        workdir: "/workspace/inside".into(),
        ..spec()
    };
    let actor = SandboxdActor::connect(&options(router.address), &inside)
        .unwrap_or_else(|error| panic!("{error}: {}", container.log()));
    assert_eq!(text(&actor, "pwd; id -u"), "/workspace/inside\n0");
    let kernel = text(&actor, "tr '\\0' ' ' < /proc/1/cmdline; cat /proc/version");
    assert!(
        kernel.contains(" sandboxd ") && kernel.contains("4.4.0"),
        "{kernel}"
    );
    let tree = FileTree::of_file("a", *b"into the actor").unwrap();
    actor.put(Path::new("/workspace/inside/t"), &tree).unwrap();
    let back = actor.get(Path::new("/workspace/inside/t"), TreeLimits::default());
    assert_eq!(back.unwrap(), tree);
    assert!(
        !Path::new("/workspace/inside").exists(),
        "it is on the host"
    );
    let limit = Duration::from_secs(1);
    let command = ActorCommand {
        timeout: limit,
        ..ActorCommand::shell("(setsid sleep 1000 &); sleep 1001")
    };
    let output = actor.exec(&command).unwrap();
    assert_eq!(output.ending, Ending::TimedOut { limit });
    let left = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -c '^sleep' || true";
    assert_eq!(text(&actor, left), "0");
    Box::new(actor).destroy().unwrap();
    drop(container);
}
