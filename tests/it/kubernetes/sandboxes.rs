//! What a pod is like, and the pools that pods come from.

use std::time::Duration;

use wardian::actor::kubernetes::{Controller as Family, KubernetesBackend};
use wardian::actor::{ActorBackend as _, ActorCommand, ActorSpec, User};

use super::store::{KRUISE_SET, POLICY, SIG_POOL, SIG_TEMPLATE};
use super::{Scene, agent_sandbox, eventually, kruise, spec};
use crate::actor::text;

#[test]
fn folders_of_the_image_are_writable_where_the_spec_says() {
    let scene = kruise();
    let spec = ActorSpec {
        writable: vec!["/usr/share/base-files".into()],
        ..spec()
    };
    let actor = scene.backend().create(&spec).unwrap();
    let inside = text(
        &*actor,
        "ls /usr/share/base-files; echo mine > /usr/share/base-files/mine && cat /usr/share/base-files/mine; id -u",
    );
    let image = std::process::Command::new("ls")
        .arg("/usr/share/base-files")
        .output()
        .unwrap();
    let image = String::from_utf8(image.stdout).unwrap();
    assert!(!image.is_empty());
    for name in image.lines() {
        assert!(inside.lines().any(|line| line == name), "{name}: {inside}");
    }
    assert!(inside.ends_with("mine\n65532"), "{inside}");
    let denied = crate::actor::sh(&*actor, "touch /usr/mine");
    assert!(!denied.is_success(), "other folders are the image's");
    assert!(denied.stderr.text().contains("denied"), "{denied:?}");
    drop(actor);
    scene.close();
}

#[test]
fn root_is_refused_where_pods_are_restricted() {
    let mut scene = Scene::bare();
    let mut options = scene.options(Family::kruise());
    options.user = User::default();
    options.ready_timeout = Duration::from_secs(2);
    scene.backend = Some(KubernetesBackend::open(options).unwrap());
    assert!(scene.backend().capabilities().writable_root);
    let error = scene.backend().create(&spec()).unwrap_err();
    assert!(!error.is_guests_doing(), "{error}");
    let sandboxes = scene.cluster.store().list(&super::store::KRUISE_SANDBOX);
    let said = sandboxes[0]["status"]["message"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(
        said.contains("runAsNonRoot != true"),
        "it reached the barrier: {said}"
    );
    scene.close();
}

#[test]
fn no_sandbox_is_made_without_its_network_policy() {
    let scene = agent_sandbox();
    let policies = scene.cluster.store().list(&POLICY);
    let name = policies[0]["metadata"]["name"].as_str().unwrap().to_owned();
    // Somebody opens it.
    scene.cluster.store().update(&POLICY, &name, |policy| {
        policy["spec"]["egress"] = serde_json::json!([{}]);
    });
    let error = scene.backend().create(&spec()).unwrap_err();
    assert!(
        error.to_string().contains("is not there as it was made"),
        "{error}"
    );
    assert!(!error.is_guests_doing());
    let templates = scene.cluster.store().list(&SIG_TEMPLATE);
    assert!(templates.is_empty(), "nothing was made of it");
    scene.close();
}

#[test]
fn a_long_script_travels_as_a_file() {
    let scene = kruise();
    let actor = scene.actor();
    let long = "x'\"$ü\n".repeat(20_000);
    let script = format!(
        "cat > given; printf %s {} | wc -c; ls -a /tmp | grep -c wardian",
        "y".repeat(100_000)
    );
    let command = ActorCommand {
        stdin: long.clone().into_bytes(),
        ..ActorCommand::shell(script)
    };
    let output = actor.exec(&command).unwrap();
    assert_eq!(output.stdout.text(), "100000\n0\n", "{output:?}");
    let length = text(&*actor, "wc -c < given");
    assert_eq!(length, long.len().to_string());
    drop(actor);
    scene.close();
}

#[test]
fn pools_that_nobody_uses_are_given_up() {
    for family in [Family::kruise(), Family::agent_sandbox()] {
        let is_kruise = family == Family::kruise();
        let mut scene = Scene::bare();
        let mut options = scene.options(family);
        options.pools = 1;
        scene.backend = Some(KubernetesBackend::open(options).unwrap());
        let pools = |scene: &Scene| {
            let kind = if is_kruise { KRUISE_SET } else { SIG_POOL };
            scene.cluster.store().list(&kind).len()
        };
        let of = |name: &str| ActorSpec {
            env: [("NAME".to_owned(), name.to_owned())].into(),
            ..spec()
        };
        let first = scene.backend().create(&of("first")).unwrap();
        let second = scene.backend().create(&of("second")).unwrap();
        assert_eq!(pools(&scene), 2, "both are in use");
        assert_eq!(text(&*first, "echo $NAME"), "first");
        assert_eq!(text(&*second, "echo $NAME"), "second");
        drop((first, second));
        let third = scene.backend().create(&of("third")).unwrap();
        eventually("pools are kept", || pools(&scene) == 1);
        assert_eq!(text(&*third, "echo $NAME"), "third");
        drop(third);
        scene.close();
    }
}

#[test]
fn without_warm_sandboxes_one_is_made_for_each_claim() {
    let mut scene = Scene::bare();
    let mut options = scene.options(Family::kruise());
    options.warm = 0;
    scene.backend = Some(KubernetesBackend::open(options).unwrap());
    let actor = scene.actor();
    assert_eq!(text(&*actor, "echo here"), "here");
    drop(actor);
    scene.close();
}

#[test]
fn what_is_rarely_asked_for_is_not_kept_warm() {
    let mut scene = Scene::bare();
    let mut options = scene.options(Family::kruise());
    options.warm = 1;
    scene.backend = Some(KubernetesBackend::open(options).unwrap());
    let rare = ActorSpec {
        is_rare: true,
        ..spec()
    };
    for spec in [&rare, &spec()] {
        let actor = scene.backend().create(spec).unwrap();
        assert_eq!(text(&*actor, "echo here"), "here");
    }
    let pools = scene.cluster.store().list(&KRUISE_SET);
    let mut warm: Vec<_> = pools
        .iter()
        .map(|pool| pool["spec"]["replicas"].as_u64())
        .collect();
    warm.sort();
    assert_eq!(warm, [Some(0), Some(1)]);
    scene.close();
}

#[test]
fn what_runs_in_the_background_holds_nobody_up() {
    let scene = kruise();
    let actor = scene.actor();
    let started = std::time::Instant::now();
    let output = crate::actor::sh(
        &*actor,
        "(sleep 1234; echo late) & echo done; echo error >&2; exit 7",
    );
    assert_eq!(output.code(), Some(7), "{output:?}");
    assert_eq!(output.stdout.text(), "done\n");
    assert_eq!(output.stderr.text(), "error\n", "nothing of ours is in it");
    // It has the streams of its parent until it ends.
    assert!(started.elapsed() < Duration::from_secs(30));
    let there =
        "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -c '^sleep 1234'";
    assert_eq!(text(&*actor, there), "1", "it goes on");
    drop(actor);
    scene.close();
}
