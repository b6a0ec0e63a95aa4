//! Actors of a Substrate: a control plane and a router of our own, with real machines behind them. All that concerns the
//! control plane is checked over gRPC and by `kubectl ate` alike.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod control;
mod grpc;
mod kubectl;
mod router;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use wardian::actor::sandboxd::{BearerToken, SandboxdActor, SandboxdOptions};
use wardian::actor::substrate::{
    ControlPlane, SubstrateBackend, SubstrateOptions, TemplateOptions,
};
use wardian::actor::{
    Actor, ActorBackend as _, ActorCommand, ActorError, ActorLimits, ActorSpec, Ending, FileTree,
    RootFs, TreeLimits, User,
};
use wardian::http::tls::TlsFiles;

use self::control::{ATESPACE, Control, Settings};
use self::router::Router;
use crate::actor::sandboxd::{Machines, TOKEN};
use crate::actor::{sh, text};

/// An image of which there is a template.
const IMAGE: &str = "registry.example.org/ready:1";

/// A cluster, and options to reach it.
struct Cluster {
    control: Arc<Control>,
    router: Router,
    options: SubstrateOptions,
    _server: Option<grpc::Server>,
}

#[derive(Debug, Clone, Copy)]
enum By {
    Grpc,
    Kubectl,
}

impl Cluster {
    fn start(by: By, settings: Settings) -> Self {
        let control = Control::new(settings);
        let router = Router::start(Arc::clone(&control));
        let (plane, server) = match by {
            By::Grpc => {
                let server = grpc::Server::start(Arc::clone(&control), None);
                let plane = ControlPlane::Grpc {
                    url: format!("http://{}", server.address),
                    tls: TlsFiles::default(),
                    token_file: None,
                };
                (plane, Some(server))
            }
            By::Kubectl => {
                let program = kubectl::start(Arc::clone(&control));
                let arguments = vec!["--context".to_owned(), "tests".to_owned()];
                (ControlPlane::Kubectl { program, arguments }, None)
            }
        };
        let options = SubstrateOptions {
            templates: [(IMAGE.to_owned(), "ready-made".to_owned())].into(),
            // Most are tried with root's rights, as more can go wrong with them.
            user: User::default(),
            patience: Duration::from_secs(10),
            call_timeout: Duration::from_secs(30),
            ..SubstrateOptions::new(
                plane,
                ATESPACE,
                format!("http://{}", router.address),
                BearerToken::new(TOKEN).unwrap(),
            )
        };
        Self {
            control,
            router,
            options,
            _server: server,
        }
    }

    fn open(&self) -> SubstrateBackend {
        SubstrateBackend::open(self.options.clone()).unwrap()
    }
}

fn spec() -> ActorSpec {
    ActorSpec {
        limits: ActorLimits {
            lifetime: Duration::from_secs(300),
            ..ActorLimits::default()
        },
        ..ActorSpec::new(RootFs::Image(IMAGE.to_owned()))
    }
}

fn pinned() -> String {
    format!(
        "registry.example.org/new@sha256:{}",
        "0123456789abcdef".repeat(4)
    )
}

macro_rules! both {
    ($($case:ident)*) => {
        mod by_grpc {
            $(
                #[test]
                fn $case() {
                    super::$case(super::By::Grpc);
                }
            )*
        }
        mod by_kubectl {
            $(
                #[test]
                fn $case() {
                    super::$case(super::By::Kubectl);
                }
            )*
        }
    };
}

both! {
    actors_run_commands_and_carry_trees
    a_snapshot_starts_a_group
    actors_wait_for_a_worker
    a_template_is_made_once_and_waited_for
    what_cannot_be_is_refused
    a_crash_is_ours_unless_it_was_memory
    lost_answers_make_nothing_twice
    what_crashed_runs_left_is_deleted
    older_servers_do
    what_cannot_be_deleted_as_it_runs_is_suspended_before
}

fn actors_run_commands_and_carry_trees(by: By) {
    let cluster = Cluster::start(by, Settings::default());
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    assert!(actor.id().starts_with("wardian-run-"), "{}", actor.id());
    assert_eq!(text(&*actor, "pwd; echo $HOME"), "/workspace\n/root");
    assert_eq!(sh(&*actor, "exit 7").code(), Some(7));
    let limit = Duration::from_millis(300);
    let command = ActorCommand {
        timeout: limit,
        ..ActorCommand::shell("sleep 1000")
    };
    assert_eq!(
        actor.exec(&command).unwrap().ending,
        Ending::TimedOut { limit }
    );
    let tree = FileTree::of_file("a", *b"x").unwrap();
    actor.put(Path::new("/workspace/t"), &tree).unwrap();
    let back = actor
        .get(Path::new("/workspace/t"), TreeLimits::default())
        .unwrap();
    assert_eq!(back, tree);
    assert_eq!(actor.logs().is_empty(), matches!(by, By::Grpc));
    actor.destroy().unwrap();
    assert_eq!(cluster.control.names(), [""; 0]);
    // One that is dropped is gone when the backend is.
    drop(backend.create(&spec()).unwrap());
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
    assert_eq!(cluster.control.unguarded(), [""; 0], "all had a policy");
}

fn a_snapshot_starts_a_group(by: By) {
    let cluster = Cluster::start(by, Settings::default());
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    text(
        &*actor,
        "echo prepared > state; setsid sleep 1000 >/dev/null 2>&1 < /dev/null & echo",
    );
    let snapshot = actor.snapshot().unwrap();
    // It goes on, processes included, and its server knows it still.
    let sleeping = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -c '^sleep' || true";
    assert_eq!(text(&*actor, sleeping), "1");
    text(&*actor, "echo original > state");
    let group: Vec<Box<dyn Actor>> = std::thread::scope(|scope| {
        let starting: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| snapshot.restore().unwrap()))
            .collect();
        starting
            .into_iter()
            .map(|member| member.join().unwrap())
            .collect()
    });
    for (member, number) in group.iter().zip(0..) {
        let script = format!("cat state; echo {number} > state");
        assert_eq!(text(&**member, &script), "prepared");
    }
    for (member, number) in group.iter().zip(0..) {
        assert_eq!(text(&**member, "cat state"), number.to_string());
    }
    assert_eq!(text(&*actor, "cat state"), "original");
    let fork = actor.fork().unwrap();
    drop(actor);
    // The tag stays for those that started from it (the control plane checks that).
    drop(snapshot);
    assert_eq!(text(&*fork, "cat state"), "original");
    drop((group, fork));
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
    assert_eq!(cluster.control.unguarded(), [""; 0]);
}

fn actors_wait_for_a_worker(by: By) {
    let settings = Settings {
        workers: 1,
        ..Settings::default()
    };
    let mut cluster = Cluster::start(by, settings);
    let backend = cluster.open();
    let first = backend.create(&spec()).unwrap();
    text(&*first, "true");
    std::thread::scope(|scope| {
        let second = scope.spawn(|| backend.create(&spec()));
        let started = Instant::now();
        while cluster.control.names().len() < 2 {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "it was not made"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(500));
        first.destroy().unwrap();
        let second = second.join().unwrap().unwrap();
        assert_eq!(text(&*second, "echo on"), "on");
    });
    drop(backend);
    // Where none becomes free, it is ours.
    cluster.options.ready_timeout = Duration::from_secs(2);
    let backend = cluster.open();
    cluster.control.set(|settings| settings.workers = 0);
    let error = backend.create(&spec()).unwrap_err();
    assert!(error.to_string().contains("no free workers"), "{error}");
    assert!(!error.is_guests_doing(), "{error}");
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
}

fn a_template_is_made_once_and_waited_for(by: By) {
    let settings = Settings {
        golden_delay: Duration::from_secs(1),
        ..Settings::default()
    };
    let mut cluster = Cluster::start(by, settings);
    let volume = format!("registry.example.org/wardian@sha256:{}", "0".repeat(64));
    cluster.options.new_templates = Some(TemplateOptions {
        sandboxd_image: Some(volume.clone()),
        ..TemplateOptions::new("gs://bucket/folder", "gvisor")
    });
    let backend = cluster.open();
    let spec = ActorSpec {
        root: RootFs::Image(pinned()),
        ..spec()
    };
    std::thread::scope(|scope| {
        let starting: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| backend.create(&spec).unwrap()))
            .collect();
        for actor in starting {
            assert_eq!(text(&*actor.join().unwrap(), "echo on"), "on");
        }
    });
    assert_eq!(cluster.control.count("CreateActorTemplate"), 1);
    let template = &cluster.control.templates()[0];
    let container = &template.containers[0];
    assert_eq!(container.image, pinned());
    assert_eq!(container.command[..2], ["/opt/wardian/wardian", "sandboxd"]);
    assert_eq!(container.env[0].value, TOKEN);
    let probe = container
        .wakeup_probe
        .as_ref()
        .unwrap()
        .http_get
        .as_ref()
        .unwrap();
    assert_eq!((probe.path.as_str(), probe.port), ("/readyz", 80));
    assert_eq!(
        template.volumes[0].image.as_ref().unwrap().reference,
        volume
    );
    assert_eq!(
        template.snapshot_config.as_ref().unwrap().on_commit,
        1,
        "memory is kept"
    );
    let limit = &template.resources.as_ref().unwrap().limits[0];
    assert_eq!(
        (limit.name.as_str(), limit.quantity.as_str()),
        ("memory", "2147483648")
    );
    // One that never becomes ready says why, and does not stay.
    cluster
        .control
        .set(|settings| settings.golden_error = "ImagePull: no such image".to_owned());
    let other = ActorSpec {
        root: RootFs::Image(pinned().replace("new@", "other@")),
        ..spec
    };
    let error = backend.create(&other).unwrap_err();
    assert!(error.to_string().contains("no such image"), "{error}");
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
}

fn what_cannot_be_is_refused(by: By) {
    let mut cluster = Cluster::start(by, Settings::default());
    let backend = cluster.open();
    let create = |root: RootFs| backend.create(&ActorSpec { root, ..spec() }).unwrap_err();
    for root in [RootFs::Host, RootFs::Folder("/".into())] {
        let error = create(root);
        assert!(matches!(error, ActorError::Unsupported { .. }), "{error}");
    }
    let error = create(RootFs::Image("registry.example.org/none:1".to_owned()));
    assert!(error.to_string().contains("no template"), "{error}");
    let mounting = ActorSpec {
        mounts: vec![("/usr".into(), "/mnt".into())],
        ..spec()
    };
    let error = backend.create(&mounting).unwrap_err();
    assert!(matches!(error, ActorError::Unsupported { .. }), "{error}");
    drop(backend);
    cluster.options.new_templates = Some(TemplateOptions::new("gs://bucket", "gvisor"));
    let backend = cluster.open();
    let unpinned = ActorSpec {
        root: RootFs::Image("registry.example.org/none:1".to_owned()),
        ..spec()
    };
    let error = backend.create(&unpinned).unwrap_err();
    assert!(error.to_string().contains("digest"), "{error}");
    drop(backend);
    assert_eq!(cluster.control.count("CreateActor"), 0);
    // An atespace that is not there, and an actor of another token.
    let mut other = cluster.options.clone();
    other.token = BearerToken::new("another-token-of-16").unwrap();
    let backend = SubstrateBackend::open(other).unwrap();
    let error = backend.create(&spec()).unwrap_err();
    assert!(error.to_string().contains("another token"), "{error}");
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
}

fn a_crash_is_ours_unless_it_was_memory(by: By) {
    let mut cluster = Cluster::start(by, Settings::default());
    cluster.options.patience = Duration::from_secs(1);
    let backend = cluster.open();
    for (message, is_guests) in [
        ("worker pod was evicted", false),
        ("container sandboxd: OOMKilled", true),
    ] {
        let actor = backend.create(&spec()).unwrap();
        let running = ActorCommand::shell("echo > /tmp/begun; sleep 1000");
        let done = std::thread::scope(|scope| {
            let done = scope.spawn(|| actor.exec(&running));
            std::thread::sleep(Duration::from_millis(500));
            cluster.control.crash(actor.id(), message);
            done.join().unwrap()
        });
        match is_guests {
            true => {
                let ending = done.unwrap().ending;
                let expected = Ending::Killed {
                    reason: message.to_owned(),
                };
                assert_eq!(ending, expected);
            }
            false => {
                let error = done.unwrap_err();
                assert!(error.to_string().contains(message), "{error}");
                assert!(!error.is_guests_doing(), "{error}");
            }
        }
        // It takes no further command, and says the same.
        match actor.exec(&ActorCommand::new(["true"])) {
            Ok(output) => assert!(is_guests && output.code().is_none(), "{output:?}"),
            Err(error) => assert!(!is_guests && error.to_string().contains(message), "{error}"),
        }
        let put = actor
            .put(Path::new("/tmp/x"), &FileTree::new())
            .unwrap_err();
        assert_eq!(put.is_guests_doing(), is_guests, "{put}");
        actor.destroy().unwrap();
    }
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
}

fn lost_answers_make_nothing_twice(by: By) {
    let settings = Settings {
        loses: vec![
            "CreateActor",
            "CreateActorEgressPolicy",
            "ResumeActor",
            "SuspendActor",
            "CreateTag",
            "DeleteActor",
            "DeleteTag",
        ],
        ..Settings::default()
    };
    let cluster = Cluster::start(by, settings);
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    text(&*actor, "echo prepared > state");
    let member = actor.snapshot().unwrap().restore().unwrap();
    assert_eq!(text(&*member, "cat state"), "prepared");
    assert_eq!(cluster.control.names().len(), 2);
    actor.destroy().unwrap();
    drop(member);
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
}

fn what_crashed_runs_left_is_deleted(by: By) {
    use wardian::actor::substrate::messages as m;
    let mut cluster = Cluster::start(by, Settings::default());
    let names = [
        // Its time is over.
        "wardian-run-00000001-0badf00d-1",
        // Its run may live.
        "wardian-run-ffffffff-0badf00d-2",
        // It is of an earlier run of the same owner.
        "wardian-job-7-ffffffff-0badf00d-3",
        "somebody-elses",
    ];
    for name in names {
        let metadata = Some(m::Metadata {
            atespace: ATESPACE.to_owned(),
            name: name.to_owned(),
        });
        let template = Some(m::ObjectRef {
            atespace: ATESPACE.to_owned(),
            name: "ready-made".to_owned(),
        });
        let actor = m::Actor {
            metadata: metadata.clone(),
            actor_template: template,
            ..m::Actor::default()
        };
        cluster.control.create_actor(Some(actor)).unwrap();
        let source_actor = Some(m::ObjectRef {
            atespace: ATESPACE.to_owned(),
            name: name.to_owned(),
        });
        let tag = m::Tag {
            metadata,
            source_actor,
            ..m::Tag::default()
        };
        cluster.control.create_tag(Some(tag)).unwrap();
    }
    drop(cluster.open());
    assert_eq!(cluster.control.names(), [names[3], names[2], names[1]]);
    cluster.options.owner = Some("job-7".to_owned());
    drop(cluster.open());
    assert_eq!(cluster.control.names(), [names[3], names[1]]);
    let expected = [names[3], names[1], names[3], names[1]];
    assert_eq!(cluster.control.everything(), expected, "tags as well");
}

fn older_servers_do(by: By) {
    let settings = Settings {
        has_policies: false,
        has_tags: false,
        ..Settings::default()
    };
    let mut cluster = Cluster::start(by, settings);
    let backend = cluster.open();
    let error = backend.create(&spec()).unwrap_err();
    assert!(matches!(error, ActorError::Unusable { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("`actor.substrate.allow_missing_egress_policies`"),
        "{error}"
    );
    assert_eq!(cluster.control.count("ResumeActor"), 0, "nothing ran");
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
    cluster.options.allow_missing_egress_policies = true;
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    let error = actor.snapshot().unwrap_err();
    assert!(matches!(error, ActorError::Unsupported { .. }), "{error}");
    assert_eq!(text(&*actor, "echo on"), "on", "it goes on");
    drop((actor, backend));
    assert_eq!(cluster.control.everything(), [""; 0]);
}

fn what_cannot_be_deleted_as_it_runs_is_suspended_before(by: By) {
    let settings = Settings {
        has_any_state: false,
        ..Settings::default()
    };
    let cluster = Cluster::start(by, settings);
    let backend = cluster.open();
    backend.create(&spec()).unwrap().destroy().unwrap();
    assert_eq!(cluster.control.names(), [""; 0]);
    assert_eq!(cluster.control.count("SuspendActor"), 1);
    drop(backend.create(&spec()).unwrap());
    drop(backend);
    assert_eq!(cluster.control.everything(), [""; 0]);
}

/// Who may end the server inside, does; who may not, cannot.
#[test]
fn a_server_that_root_has_ended_is_the_guests_doing() {
    let mut cluster = Cluster::start(By::Grpc, Settings::default());
    cluster.options.patience = Duration::from_secs(2);
    let end = ActorCommand::shell("kill -TERM 1; sleep 20");
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    let output = actor.exec(&end).unwrap();
    assert!(matches!(output.ending, Ending::Killed { .. }), "{output:?}");
    let error = actor.get(Path::new("/workspace"), TreeLimits::default());
    assert!(error.unwrap_err().is_guests_doing());
    drop((actor, backend));
    cluster.options.user = User {
        uid: 1234,
        gid: 4321,
    };
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    let ids = "id -u; id -g; id -G; stat -c %u:%g .; echo mine > file && cat file";
    assert_eq!(text(&*actor, ids), "1234\n4321\n4321\n1234:4321\nmine");
    let refused = sh(
        &*actor,
        "kill -TERM 1 2>&1 || echo refused; kill -KILL 1 || echo again",
    );
    assert_eq!(
        refused.stdout.text().matches("refused").count(),
        1,
        "{refused:?}"
    );
    assert!(refused.stdout.text().contains("again"), "{refused:?}");
    assert_eq!(text(&*actor, "echo on"), "on");
    // Where nothing had such rights, an actor that is not reached is ours.
    const AWAY: &str = "HTTP/1.1 503 S\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    cluster.router.says(&[AWAY; 200]);
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(!error.is_guests_doing(), "{error}");
    cluster.router.says(&[]);
    // Who is asked to be root is.
    let root = ActorCommand {
        user: Some(User::default()),
        ..ActorCommand::new(["id", "-u"])
    };
    let fresh = backend.create(&spec()).unwrap();
    assert_eq!(fresh.exec(&root).unwrap().stdout.text(), "0\n");
    drop((actor, fresh, backend));
    assert_eq!(cluster.control.everything(), [""; 0]);
}

#[test]
fn requests_are_delivered_once() {
    const STALE: &str = "HTTP/1.1 421 M\r\nX-Ate-Assignment-Stale: true\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    const BUSY: &str =
        "HTTP/1.1 503 S\r\nContent-Length: 18\r\nConnection: close\r\n\r\nrouter at capacity";
    const PLAIN: &str = "HTTP/1.1 421 M\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let mut cluster = Cluster::start(By::Grpc, Settings::default());
    // After root's commands it would be asked whether the server is there still.
    cluster.options.user = User {
        uid: 1234,
        gid: 1234,
    };
    let backend = cluster.open();
    let actor = backend.create(&spec()).unwrap();
    for answers in [&[STALE][..], &[BUSY, BUSY], &[STALE, BUSY, STALE]] {
        cluster.router.says(answers);
        assert_eq!(text(&*actor, "echo x >> ran; wc -l < ran; : > ran"), "1");
        assert_eq!(cluster.router.delivered(), 1, "{answers:?}");
    }
    // What the actor itself says by 421 is not for another try.
    cluster.router.says(&[PLAIN]);
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(error.to_string().contains("421"), "{error}");
    assert_eq!(cluster.router.delivered(), 0);
    drop((actor, backend));
    assert_eq!(cluster.control.everything(), [""; 0]);
}

/// Who signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Returns a certificate and its key in one text, the key first.
    fn bundle(&self) -> String {
        let (certificate, key) = self.issue();
        format!("{}{}", key.serialize_pem(), certificate.pem())
    }

    fn issue(&self) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap(), key)
    }

    /// Returns what a server that lets in those whom `clients` signed speaks HTTP/2 by.
    fn server(&self, clients: &Self) -> Arc<rustls::ServerConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(clients.0.der().clone()).unwrap();
        let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
            roots.into(),
            Arc::clone(&provider),
        );
        let (certificate, key) = self.issue();
        let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config)
    }
}

#[test]
fn a_certificate_that_is_changed_is_shown_from_then_on() {
    let mut cluster = Cluster::start(By::Grpc, Settings::default());
    let (servers, first, second) = (
        Authority::new("servers"),
        Authority::new("first"),
        Authority::new("second"),
    );
    let tls = Arc::new(Mutex::new(servers.server(&first)));
    let server = grpc::Server::start(Arc::clone(&cluster.control), Some(Arc::clone(&tls)));
    let folder = tempfile::tempdir().unwrap();
    let (bundle, ca) = (
        folder.path().join("bundle.pem"),
        folder.path().join("ca.pem"),
    );
    fs_err::write(&bundle, first.bundle()).unwrap();
    fs_err::write(&ca, servers.0.pem()).unwrap();
    cluster.options.call_timeout = Duration::from_secs(5);
    cluster.options.ready_timeout = Duration::from_secs(5);
    cluster.options.control = ControlPlane::Grpc {
        url: format!("https://{}", server.address),
        tls: TlsFiles {
            certificate: Some(bundle.clone()),
            key: None,
            ca: Some(ca),
        },
        token_file: None,
    };
    let backend = cluster.open();
    backend.create(&spec()).unwrap().destroy().unwrap();
    // The cluster's authority is another one now: what was shown until now is refused.
    *tls.lock().unwrap() = servers.server(&second);
    let error = backend.create(&spec()).unwrap_err();
    assert!(!error.is_guests_doing(), "{error}");
    fs_err::write(&bundle, second.bundle()).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    let actor = backend.create(&spec()).unwrap();
    assert_eq!(text(&*actor, "echo on"), "on");
    drop((actor, backend));
    assert_eq!(cluster.control.everything(), [""; 0]);
}

#[test]
fn a_server_inside_and_its_client_know_each_other_by_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs_err::write(&path, text).unwrap();
        path
    };
    let (servers, first, second) = (
        Authority::new("servers"),
        Authority::new("first"),
        Authority::new("second"),
    );
    let own = write("server.pem", servers.bundle());
    let clients = write("clients.pem", first.0.pem());
    let machine = Machines::new(folder.path()).start_plain_with(&[
        "--tls-cert",
        &own.to_string_lossy(),
        "--tls-client-ca",
        &clients.to_string_lossy(),
    ]);
    let bundle = write("client.pem", first.bundle());
    let options = SandboxdOptions {
        url: format!("https://{}", machine.address),
        tls: TlsFiles {
            certificate: Some(bundle),
            key: None,
            ca: Some(write("ca.pem", servers.0.pem())),
        },
        patience: Duration::from_secs(1),
        ready_timeout: Duration::from_secs(1),
        ..machine.options()
    };
    let spec = ActorSpec {
        workdir: folder.path().join("work"),
        ..ActorSpec::new(RootFs::Host)
    };
    let actor = SandboxdActor::connect(&options, &spec).unwrap();
    assert_eq!(text(&actor, "echo on"), "on");
    let nobody = SandboxdOptions {
        tls: TlsFiles {
            certificate: None,
            ..options.tls.clone()
        },
        ..options
    };
    let error = SandboxdActor::connect(&nobody, &spec).unwrap_err();
    assert!(!error.is_guests_doing(), "{error}");
    // Both sides have others from now on: connections that come next are by those.
    write("clients.pem", second.0.pem());
    write("client.pem", second.bundle());
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(text(&actor, "echo on"), "on");
}

#[test]
fn a_token_is_read_for_each_call() {
    let token = "a-token-of-a-service-account";
    let settings = Settings {
        token: Some(token.to_owned()),
        ..Settings::default()
    };
    let mut cluster = Cluster::start(By::Grpc, settings);
    let error = SubstrateBackend::open(cluster.options.clone()).unwrap_err();
    assert!(matches!(error, ActorError::Unusable { .. }), "{error}");
    assert!(error.to_string().contains("Unauthenticated"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs_err::write(&path, token).unwrap();
    let ControlPlane::Grpc { token_file, .. } = &mut cluster.options.control else {
        panic!("it is gRPC");
    };
    *token_file = Some(path.clone());
    let backend = cluster.open();
    let newer = "a-token-that-came-after-it";
    cluster
        .control
        .set(|settings| settings.token = Some(newer.to_owned()));
    fs_err::write(&path, newer).unwrap();
    backend.create(&spec()).unwrap().destroy().unwrap();
}
