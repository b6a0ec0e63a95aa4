//! The same gradings in gVisor, and a Harbor verifier that an agent would like to deceive.

use std::time::Duration;

use indexmap::IndexMap;
use wardian::actor::runsc::{RunscBackend, RunscOptions};
use wardian::actor::{Actor, ActorBackend as _, ActorCommand, ActorSpec, RootFs};
use wardian::env::actors::{ActorSandbox, Controls, InstanceGrader, judge_trial};
use wardian::grader::swebench::SwebenchBonus;
use wardian::grader::{GradingFile, RewardFault, VerdictStatus, VerifyJob, verify};
use wardian::task::harbor::HarborTask;
use wardian::task::swebench::SwebenchInstance;

use super::grading::{CHEAT, GOLD, TEST_PATCH, repository};

fn backend(base: &tempfile::TempDir) -> RunscBackend {
    let options = RunscOptions {
        folder: Some(base.path().to_owned()),
        ..RunscOptions::default()
    };
    RunscBackend::open(&options).expect("gVisor is installed, and the tests run as root")
}

fn row() -> serde_json::Value {
    serde_json::json!({
        "repo": "a/b", "instance_id": "a__b-1", "base_commit": "base", "version": "1",
        "problem_statement": "Twice two is not four.",
        "patch": GOLD, "test_patch": TEST_PATCH, "log_parser": "parse_log_pytest",
        "FAIL_TO_PASS": ["two"], "PASS_TO_PASS": ["zero"], "workdir": "/testbed",
        "test_command": "bad=0; . tests/conftest.py; . tests/test_twice.sh; exit $bad",
    })
}

fn instance() -> SwebenchInstance {
    instance_of(&row())
}

fn instance_of(row: &serde_json::Value) -> SwebenchInstance {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let path = folder.path().join("a.jsonl");
    fs_err::write(&path, row.to_string()).expect("the file is written");
    SwebenchInstance::read_file(&path)
        .expect("it is an instance")
        .remove(0)
}

#[test]
fn gold_gets_one_and_nothing_and_a_cheat_get_none_in_gvisor() {
    let base = tempfile::tempdir().unwrap();
    let backend = backend(&base);
    let (root, _) = repository();
    let mut spec = ActorSpec::new(RootFs::Host);
    spec.mounts
        .push((root.path().join("testbed"), "/base".into()));
    let instance = instance();
    let broken = GOLD.replace("* 2))", "* 3))");
    for (patch, reward, status) in [
        (GOLD.to_owned(), Some(1.0), VerdictStatus::Passed),
        (String::new(), Some(0.0), VerdictStatus::Invalid),
        (CHEAT.to_owned(), Some(0.0), VerdictStatus::Invalid),
        (format!("{CHEAT}{broken}"), Some(0.0), VerdictStatus::Failed),
    ] {
        let grade = grader(&backend, &spec, &instance, &Controls::default())
            .grade(&patch)
            .unwrap();
        let verdict = grade.verdict;
        assert_eq!(
            (verdict.reward, verdict.status),
            (reward, status),
            "{patch}: {verdict:?}"
        );
    }
    drop(backend);
    assert_eq!(
        fs_err::read_dir(base.path())
            .unwrap()
            .filter(is_folder)
            .count(),
        0
    );
}

fn grader<'a>(
    backend: &'a RunscBackend,
    spec: &'a ActorSpec,
    instance: &'a SwebenchInstance,
    controls: &'a Controls,
) -> InstanceGrader<'a> {
    InstanceGrader {
        backend,
        spec,
        instance,
        bonus: SwebenchBonus::default(),
        timeout: Duration::from_secs(10),
        controls,
    }
}

/// A patch of the sources that puts something else in the place of `twice`, which the tests read.
fn patch_to(line: &str) -> String {
    let patch = GOLD.replace("twice() { echo $(($1 * 2)); }", line);
    assert_ne!(patch, GOLD);
    patch
}

/// What looks like a broken environment is the patch's doing where the reference passes, and nobody's where it
/// does not pass either.
#[test]
fn a_patch_that_breaks_the_tests_gets_none_and_a_broken_environment_is_nobodys() {
    let base = tempfile::tempdir().unwrap();
    let backend = backend(&base);
    let (root, _) = repository();
    let mut spec = ActorSpec::new(RootFs::Host);
    spec.limits.memory = 128 << 20;
    spec.limits.disk = 128 << 20;
    spec.mounts
        .push((root.path().join("testbed"), "/base".into()));
    let sound = instance();
    // Its tests print a sign of a broken environment whatever the patch is.
    let mut row = row();
    row["test_command"] = "echo ModuleNotFoundError; exit 1".into();
    let broken = instance_of(&row);
    let controls = [Controls::default(), Controls::default()];
    for body in [
        "echo ModuleNotFoundError; exit 1",
        "echo Killed; exit 137",
        "while :; do :; done",
        "head -c 1000000000 /dev/zero > /tmp/full",
        "kill -KILL -1; kill -KILL $$",
    ] {
        let patch = patch_to(body);
        let of = |instance, controls| {
            let grade = grader(&backend, &spec, instance, controls)
                .grade(&patch)
                .unwrap();
            (grade.verdict.reward, grade.verdict.status)
        };
        assert_eq!(
            of(&sound, &controls[0]),
            (Some(0.0), VerdictStatus::Failed),
            "{body}"
        );
        assert_eq!(
            of(&broken, &controls[1]),
            (None, VerdictStatus::InfraError),
            "{body}"
        );
    }
}

fn is_folder(entry: &std::io::Result<fs_err::DirEntry>) -> bool {
    entry.as_ref().is_ok_and(|entry| entry.path().is_dir())
}

fn verifier(script: &str) -> VerifyJob {
    VerifyJob {
        tests: IndexMap::from([(
            "test.sh".to_owned(),
            GradingFile {
                content: script.as_bytes().to_vec(),
                executable: false,
            },
        )]),
        script: "/tests/test.sh".to_owned(),
        env: IndexMap::from([("WANTED".to_owned(), "hello".to_owned())]),
        workdir: None,
        user: None,
        timeout: Duration::from_secs(20),
    }
}

const JUDGE: &str = "#!/bin/sh\n[ \"$(cat /workspace/out 2>/dev/null)\" = \"$WANTED\" ] && r=1 || r=0\n\
                     echo $r > /logs/verifier/reward.txt\nsleep 1\nexit 7\n";

fn agent(actor: &dyn Actor, script: &str) {
    let output = actor.exec(&ActorCommand::shell(script)).expect("it runs");
    assert!(output.is_success(), "{}", output.stderr.text());
}

#[test]
fn a_verifier_judges_what_the_agent_left() {
    let base = tempfile::tempdir().unwrap();
    let backend = backend(&base);
    let actor = backend.create(&ActorSpec::new(RootFs::Host)).unwrap();
    let reward = |job: &VerifyJob| {
        let found = verify(&ActorSandbox::new(actor.as_ref()), job);
        found.rewards.and_then(|rewards| rewards.main())
    };
    assert_eq!(reward(&verifier(JUDGE)), Ok(0.0));
    agent(actor.as_ref(), "echo hello > /workspace/out");
    assert_eq!(reward(&verifier(JUDGE)), Ok(1.0));
    assert_eq!(reward(&verifier("#!/bin/sh\n")), Err(RewardFault::Missing));
    let nan = "#!/bin/sh\necho '{\"reward\": NaN}' > /logs/verifier/reward.json\n";
    assert_eq!(
        reward(&verifier(nan)).unwrap_err().harbor_name(),
        "VerifierOutputParseError"
    );
}

/// The attacks work on a verifier that does not clean up first.
#[test]
fn what_the_agent_left_gives_no_reward() {
    let base = tempfile::tempdir().unwrap();
    let backend = backend(&base);
    let actor = backend.create(&ActorSpec::new(RootFs::Host)).unwrap();
    // A reward in advance, a test in advance, and a program that writes rewards for ever.
    agent(
        actor.as_ref(),
        "mkdir -p /tests/test.sh /logs/verifier && echo '{\"reward\": 1}' > /logs/verifier/reward.json\n\
         (while :; do echo '{\"reward\": 1}' > /logs/verifier/reward.json; sleep 0.05; done) \
         > /dev/null 2>&1 &",
    );
    agent(
        actor.as_ref(),
        "rm -f /logs/verifier/reward.json; until grep -q 1 /logs/verifier/reward.json; do sleep 0.1; done",
    );
    let found = verify(&ActorSandbox::new(actor.as_ref()), &verifier(JUDGE));
    assert_eq!(
        found.rewards.and_then(|rewards| rewards.main()),
        Ok(0.0),
        "{}",
        found.output
    );
}

/// A separate verifier sees the artifacts and nothing else; what the agent did to its own programs does
/// not reach it.
#[test]
fn a_separate_verifier_sees_the_artifacts_alone() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, text).unwrap();
    };
    write(
        "task.toml",
        "artifacts = [\"/workspace/out\", {source = \"/data\", exclude = [\"*.tmp\"]}]\n\
         [environment]\ndocker_image = \"a\"\n[verifier]\nenvironment_mode = \"separate\"\n\
         [[verifier.collect]]\ncommand = \"cp /workspace/secret /data/collected\"\n",
    );
    write("instruction.md", "Say hello.");
    write(
        "tests/test.sh",
        "#!/bin/sh\n[ -e /workspace/secret ] && exit\n[ -e /data/x.tmp ] && exit\n\
         echo \"{\\\"reward\\\": $(cat /workspace/out), \\\"other\\\": $(cat /data/collected)}\" \
         > /logs/verifier/reward.json\n",
    );
    let task = HarborTask::read(folder.path()).unwrap();
    let part = &task.parts[0];
    let job = part.verify_job(&task.config, &|_| None).unwrap();
    let base = tempfile::tempdir().unwrap();
    let backend = backend(&base);
    let spec = ActorSpec::new(RootFs::Host);
    let actor = backend.create(&spec).unwrap();
    agent(
        actor.as_ref(),
        "echo 0.5 > /workspace/out; echo 0.25 > /workspace/secret; mkdir -p /data/in\n\
         touch /data/x.tmp /data/in/y; ln -sf /bin/true /usr/bin/cat",
    );
    let judged = judge_trial(
        &backend,
        &spec,
        &task.config,
        part,
        job,
        actor.as_ref(),
        1 << 20,
    )
    .unwrap();
    let rewards = judged.verification.rewards.expect("there are rewards");
    assert_eq!(
        (rewards.main(), rewards.get("other")),
        (Ok(0.5), Some(0.25))
    );
    let kept: Vec<(String, bool)> = (judged.artifacts.iter())
        .map(|artifact| {
            (
                artifact.destination.display().to_string(),
                artifact.bytes.is_ok(),
            )
        })
        .collect();
    let expected = [
        ("logs/artifacts", false),
        ("workspace/out", true),
        ("data", true),
    ];
    assert_eq!(
        kept,
        expected.map(|(path, is_there)| (path.to_owned(), is_there))
    );
}
