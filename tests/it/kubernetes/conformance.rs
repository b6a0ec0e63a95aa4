//! What every backend must do alike, in a cluster.

use std::time::Duration;

use wardian::actor::kubernetes::{Controller as Family, KubernetesBackend, KubernetesOptions};
use wardian::actor::{ActorBackend as _, ActorError, ActorSpec, Capabilities, Isolation, RootFs};

use super::{agent_sandbox, kruise, spec};
use crate::actor::Case;
use crate::actor::conformance;

macro_rules! conformance {
    ($($case:ident)*) => {
        mod kruise {
            $(
                #[test]
                fn $case() {
                    let scene = super::kruise();
                    super::conformance::$case(&super::Case::new(scene.backend(), super::spec()));
                    scene.close();
                }
            )*
        }

        mod agent_sandbox {
            $(
                #[test]
                fn $case() {
                    let scene = super::agent_sandbox();
                    super::conformance::$case(&super::Case::new(scene.backend(), super::spec()));
                    scene.close();
                }
            )*
        }

        /// All cases in a real cluster, one after another.
        fn run_all(case: &Case<'_>) {
            $( conformance::$case(case); )*
        }
    };
}

conformance! {
    commands_have_results commands_have_a_setting output_is_bounded a_command_ends_in_time
    programs_that_cannot_start_are_results trees_go_in_and_come_out hostile_trees_stop_at_the_host
    actors_are_apart specs_are_checked
}

#[test]
fn capabilities_are_as_the_runtime_class_says() {
    let scene = kruise();
    let Capabilities {
        isolation,
        snapshot,
        fork,
        users,
        writable_root,
        network,
        ..
    } = scene.backend().capabilities();
    assert_eq!(isolation, Isolation::UserKernel);
    assert!(!snapshot && !fork && !users && !writable_root && !network);
    let mut options = scene.options(Family::kruise());
    options.runtime_class = None;
    let weaker = KubernetesBackend::open(options).unwrap();
    assert_eq!(weaker.capabilities().isolation, Isolation::Namespaces);
    drop(weaker);
    scene.close();
}

#[test]
fn what_a_cluster_cannot_give_is_refused() {
    let scene = kruise();
    for (spec, ability) in [
        (ActorSpec::new(RootFs::Host), "name an image"),
        (
            ActorSpec {
                mounts: vec![("/usr".into(), "/mnt".into())],
                ..spec()
            },
            "show folders of this machine",
        ),
    ] {
        let error = scene.backend().create(&spec).unwrap_err();
        assert!(matches!(error, ActorError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(ability), "{error}");
    }
    let actor = scene.actor();
    for error in [actor.snapshot().unwrap_err(), actor.fork().unwrap_err()] {
        assert!(error.to_string().contains("start each member"), "{error}");
    }
    drop(actor);
    scene.close();
}

#[test]
fn a_real_cluster_does_all_of_it() {
    let family = match std::env::var("WARDIAN_TEST_CLUSTER").as_deref() {
        Ok("kruise") => Family::kruise(),
        Ok("agent-sandbox") => Family::agent_sandbox(),
        _ => {
            println!("skipped: set WARDIAN_TEST_CLUSTER to a controller, and KUBECONFIG");
            return;
        }
    };
    let variable = |name: &str| std::env::var(name).ok();
    let options = KubernetesOptions {
        namespace: variable("WARDIAN_TEST_NAMESPACE"),
        ready_timeout: Duration::from_secs(600),
        ..KubernetesOptions::new(family, "conformance")
    };
    let backend = KubernetesBackend::open(options).unwrap();
    let image = variable("WARDIAN_TEST_IMAGE").unwrap_or_else(|| "python:3.12-slim".to_owned());
    let spec = ActorSpec {
        root: RootFs::Image(image),
        ..spec()
    };
    run_all(&Case::new(&backend, spec));
}
