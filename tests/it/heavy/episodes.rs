//! Episodes that a script plays, against what the environment does.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wardian::actor::runsc::{RunscBackend, RunscOptions};
use wardian::actor::{ActorLimits, RootFs};
use wardian::chat::{Message, ParsedTurn, Role, ToolCall};
use wardian::env::actors::{
    ActorEnvironment, ActorSettings, GroupStart, Workplace, WorkplaceConfig,
};
use wardian::env::{Environment as _, EpisodeStatus, StepResult};
use wardian::grader::swebench::SwebenchBonus;
use wardian::task::{Task, TaskOptions, TaskSet};

use super::{FIXED, HARBOR, WRONG, folders_in, instances, row, write};

/// Where episodes are played, and what they leave there.
struct Scene {
    place: Arc<Workplace>,
    base: tempfile::TempDir,
    command_timeout: Duration,
}

impl Scene {
    fn new(repositories: Option<&Path>) -> Self {
        let base = tempfile::tempdir().expect("a folder");
        let options = RunscOptions {
            folder: Some(base.path().to_owned()),
            ..RunscOptions::default()
        };
        let backend =
            RunscBackend::open(&options).expect("gVisor is installed, and the tests run as root");
        let config = WorkplaceConfig {
            root: Some(RootFs::Host),
            builder: None,
            repositories: repositories.map(Path::to_owned),
            limits: ActorLimits {
                memory: 128 << 20,
                disk: 64 << 20,
                ..ActorLimits::default()
            },
            artifacts: 1 << 20,
            max_actors: 3,
        };
        Self {
            place: Arc::new(Workplace::new(Arc::new(backend), config)),
            base,
            command_timeout: Duration::from_secs(60),
        }
    }

    fn group(&self, task: &Task, members: usize) -> Vec<ActorEnvironment> {
        let repository = task.repository.clone().expect("it needs a sandbox");
        self.place.check(&repository).expect("it can be run here");
        let start = GroupStart::new(Arc::clone(&self.place), repository, members);
        let start = Arc::new(start);
        let settings = Arc::new(ActorSettings {
            system_prompt: None,
            max_turns: 4,
            max_output_chars: 2000,
            command_timeout: self.command_timeout,
            test_timeout: Duration::from_secs(60),
            bonus: SwebenchBonus::default(),
        });
        let environment = |_| {
            let task = Arc::new(task.clone());
            ActorEnvironment::new(task, Arc::clone(&start), Arc::clone(&settings))
        };
        (0..members).map(environment).collect()
    }

    fn one(&self, task: &Task) -> ActorEnvironment {
        let mut environment = self.group(task, 1).remove(0);
        environment.reset().expect("it begins");
        environment
    }

    /// Ends it; nothing is left.
    fn close(self) {
        self.place.close();
        let Self { place, base, .. } = self;
        drop(place);
        assert_eq!(folders_in(base.path()), [] as [std::path::PathBuf; 0]);
        assert_eq!(super::processes_naming(base.path()), [] as [String; 0]);
    }
}

fn tasks(path: &Path) -> TaskSet {
    TaskSet::open_with(path, &TaskOptions::default()).expect("they are tasks")
}

fn harbor(name: &str) -> Task {
    let tasks = tasks(Path::new(HARBOR));
    tasks.get(name).expect("it is carried").clone()
}

fn turn(calls: &[(&str, Value)]) -> ParsedTurn {
    let calls = calls.iter();
    ParsedTurn {
        tool_calls: calls
            .map(|(name, arguments)| Ok(ToolCall::new(*name, arguments.clone())))
            .collect(),
        ..ParsedTurn::default()
    }
}

fn play(environment: &mut ActorEnvironment, name: &str, arguments: Value) -> StepResult {
    let turn = turn(&[(name, arguments)]);
    environment.step(&turn).expect("nothing of ours fails")
}

fn bash(environment: &mut ActorEnvironment, command: &str) -> StepResult {
    play(environment, "bash", json!({"command": command}))
}

fn submit(environment: &mut ActorEnvironment) -> StepResult {
    play(environment, "submit", json!({}))
}

fn said(result: &StepResult) -> &str {
    let last = result.observation.last();
    last.map_or("", |message| message.content.as_str())
}

fn end(result: &StepResult) -> (bool, Option<f64>, Option<EpisodeStatus>) {
    (result.done, result.reward, result.status)
}

#[test]
fn a_harbor_task_is_worked_on_and_judged() {
    let scene = Scene::new(None);
    let task = harbor("greeting");
    let mut environment = scene.group(&task, 1).remove(0);
    let opening = environment.reset().unwrap();
    assert_eq!(opening[0].role, Role::System);
    assert_eq!(
        opening[1],
        Message::user("Write the word hello to hello.txt.")
    );
    let result = bash(&mut environment, "pwd; echo wrong >&2; exit 3");
    assert_eq!(said(&result), "/workspace\nwrong\n(exit code 3)");
    // What one command leaves the next one finds.
    bash(&mut environment, "echo hallo > hello.txt");
    let edit = json!({"action": "replace", "path": "hello.txt", "old": "hallo", "new": "hello"});
    let result = play(&mut environment, "edit", edit);
    assert_eq!(said(&result), "changed `/workspace/hello.txt`");
    let result = submit(&mut environment);
    assert_eq!(end(&result), (true, Some(1.0), Some(EpisodeStatus::Passed)));
    let stats = environment.stats();
    assert_eq!((stats.tool_calls, stats.tool_failures), (4, 1));
    assert!(stats.start_seconds > 0.0 && stats.grade_seconds > 0.0);

    // Who does nothing gets nothing, and so does who answers in words until the turns are over.
    let result = submit(&mut scene.one(&task));
    assert_eq!(end(&result), (true, Some(0.0), Some(EpisodeStatus::Failed)));
    let mut silent = scene.one(&task);
    for left in (0..4).rev() {
        let result = silent.step(&ParsedTurn::default()).unwrap();
        assert!(said(&result).contains("You called no tool"), "{result:?}");
        assert_eq!(result.done, left == 0);
    }
    // What is there when the tokens end is judged.
    let mut cut_off = scene.one(&task);
    bash(&mut cut_off, "echo hello > hello.txt");
    assert_eq!(cut_off.close(None).reward, Some(1.0));
    drop((environment, silent, cut_off));
    scene.close();
}

#[test]
fn the_steps_of_a_task_come_one_after_another() {
    let scene = Scene::new(None);
    let task = harbor("notes");
    let mut environment = scene.one(&task);
    bash(&mut environment, "sort -u notes.txt > sorted.txt");
    let result = submit(&mut environment);
    assert!(
        !result.done && said(&result).contains("how many lines"),
        "{result:?}"
    );
    bash(&mut environment, "wc -l < sorted.txt > count.txt");
    assert_eq!(submit(&mut environment).reward, Some(1.0));
    // Half of the steps are half of the reward; below a step's threshold there is no next one.
    let mut half = scene.one(&task);
    bash(&mut half, "sort -u notes.txt > sorted.txt");
    submit(&mut half);
    let result = submit(&mut half);
    assert_eq!(end(&result), (true, Some(0.5), Some(EpisodeStatus::Failed)));
    let result = submit(&mut scene.one(&task));
    assert_eq!(end(&result), (true, Some(0.0), Some(EpisodeStatus::Failed)));
    drop((environment, half));
    scene.close();
}

/// The reference solutions are right, and judged as such.
#[test]
fn carried_tasks_are_solved_by_their_references() {
    let scene = Scene::new(None);
    for task in tasks(Path::new(HARBOR)).tasks() {
        let Some(wardian::task::RepositoryTask::Harbor(harbor)) = task.repository.as_deref() else {
            unreachable!("it is a folder of Harbor's");
        };
        let mut environment = scene.one(task);
        let mut last = None;
        for part in &harbor.parts {
            let solution = part.solution.as_ref().expect("there is a reference");
            let script = fs_err::read_to_string(solution.join("solve.sh")).unwrap();
            let result = bash(&mut environment, &script);
            assert!(!said(&result).contains("exit code"), "{result:?}");
            last = Some(submit(&mut environment));
        }
        let last = last.expect("there is a part");
        assert_eq!((last.done, last.reward), (true, Some(1.0)), "{}", task.id);
    }
    scene.close();
}

/// A group is prepared once; what each member does is its own. There is room for fewer than there are.
#[test]
fn a_group_starts_from_one_and_its_members_share_nothing() {
    let scene = Scene::new(None);
    let task = harbor("notes");
    let group = scene.group(&task, 6);
    let seen: Vec<String> = std::thread::scope(|scope| {
        let play = |(number, mut environment): (usize, ActorEnvironment)| {
            environment.reset().unwrap();
            bash(&mut environment, &format!("echo {number} >> mine"));
            let result = bash(&mut environment, "cat mine; wc -l < notes.txt");
            said(&result).to_owned()
        };
        let members = group.into_iter().enumerate();
        let threads: Vec<_> = members
            .map(|member| scope.spawn(move || play(member)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("it plays to its end"))
            .collect()
    });
    let expected: Vec<String> = (0..6).map(|number| format!("{number}\n6")).collect();
    assert_eq!(seen, expected);
    scene.close();
}

/// What a policy can do to its actor is told to it or costs it its reward; none of it is a fault of ours.
#[test]
fn a_policy_that_breaks_its_actor_has_earned_nothing() {
    let mut scene = Scene::new(None);
    let task = harbor("greeting");
    // A command that never ends, with others that it started: the actor goes on.
    scene.command_timeout = Duration::from_secs(5);
    let mut slow = scene.one(&task);
    scene.command_timeout = Duration::from_secs(60);
    bash(&mut slow, "echo hello > hello.txt");
    let result = bash(&mut slow, "sleep 1000 & while :; do :; done");
    assert!(said(&result).contains("took more than 5 s"), "{result:?}");
    let result = bash(&mut slow, "ps 2>/dev/null | grep -c 'sleep 1000' || true");
    assert!(!result.done, "{result:?}");
    let result = submit(&mut slow);
    assert_eq!(result.reward, Some(1.0));
    assert_eq!(slow.stats().commands_timed_out, 1);

    // One that fills its memory ends with its actor.
    let mut full = scene.one(&task);
    let result = bash(
        &mut full,
        "echo hello > hello.txt; awk 'BEGIN { text = \"x\"; while (1) text = text text }'",
    );
    assert_eq!(end(&result), (true, Some(0.0), Some(EpisodeStatus::Failed)));
    assert!(said(&result).contains("held more than"), "{result:?}");
    assert_eq!(full.stats().actors_lost, 1);

    // Commands that nobody could run, tools that are not there.
    let mut odd = scene.one(&task);
    let long = "x".repeat(100_000);
    assert!(said(&bash(&mut odd, &long)).contains("at most"));
    assert!(said(&bash(&mut odd, "a\0b")).contains("zero byte"));
    let result = play(&mut odd, "python", json!({}));
    assert!(said(&result).contains("no tool `python`"), "{result:?}");
    drop((slow, full, odd));

    // An agent that breaks its tools harms itself alone.
    let mut broken = scene.one(&task);
    bash(
        &mut broken,
        "echo hello > hello.txt; for p in tar sh bash cat; do rm -f /bin/$p /usr/bin/$p; done",
    );
    let result = submit(&mut broken);
    assert_eq!(
        (result.done, result.reward),
        (true, Some(0.0)),
        "{result:?}"
    );
    drop(broken);
    scene.close();
}

/// Processes that outlive their command, in any number, and a first process that is shot at: each is the policy's own
/// doing, and has a reward.
#[test]
fn a_policy_cannot_leave_the_statistics_by_what_it_leaves_running() {
    let scene = Scene::new(None);
    let task = harbor("greeting");
    for left in [
        "(while :; do sleep 100 & done) > /dev/null 2>&1 &",
        "bomb() { bomb | bomb & }; bomb > /dev/null 2>&1",
        "(while :; do kill -KILL 1 -1; done) > /dev/null 2>&1 &",
        "(while :; do mkdir d && cd d; done) > /dev/null 2>&1 & rm -rf /workspace",
        "exec 3<>/tmp/f; (while :; do cat /dev/zero > /tmp/f; done) > /dev/null 2>&1 &",
    ] {
        let mut environment = scene.one(&task);
        let mut result = bash(&mut environment, left);
        for _ in 0..2 {
            if !result.done {
                result = bash(&mut environment, "echo hello > hello.txt");
            }
        }
        if !result.done {
            result = submit(&mut environment);
        }
        assert!(result.done && result.reward.is_some(), "{left}: {result:?}");
    }
    scene.close();
}

#[test]
fn the_tool_edit_shows_and_changes_files() {
    let scene = Scene::new(None);
    let mut environment = scene.one(&harbor("greeting"));
    let mut edit = |arguments: Value| {
        // Each call is a turn of its own; the turns are not what is tested.
        let calls = [("edit", arguments)];
        let result = environment.step(&turn(&calls)).expect("nothing fails");
        let text = said(&result).to_owned();
        (text, result.done)
    };
    let setup = "printf 'one\\ntwo\\n' > a.sh; chmod +x a.sh; ln -s a.sh link; mkdir folder; \
                 touch 'folder/a b'; printf '\\377' > bytes; head -c 2000000 /dev/zero > large; mkfifo pipe";
    let view = |path: &str| ("edit", json!({"action": "view", "path": path}));
    edit(json!({"action": "create", "path": "/workspace/new/b", "content": "b"}));
    let calls = [
        ("bash", json!({"command": setup})),
        view("a.sh"),
        view("link"),
        view("folder"),
        view("bytes"),
        view("large"),
        view("pipe"),
        view("gone"),
        view("/"),
        (
            "edit",
            json!({"action": "replace", "path": "a.sh", "old": "two", "new": "2"}),
        ),
        (
            "bash",
            json!({"command": "cat a.sh; test -x a.sh; cat new/b"}),
        ),
    ];
    let result = environment.step(&turn(&calls)).expect("nothing fails");
    let told: Vec<&str> = result
        .observation
        .iter()
        .map(|message| message.content.as_str())
        .collect();
    assert_eq!(told[1], "    1  one\n    2  two");
    for (told, expected) in [
        (told[2], "is no plain file"),
        (told[3], "`/workspace/folder` is a folder; it has a b; use"),
        (told[4], "is no text"),
        (told[5], "larger than"),
        (told[6], "is no plain file"),
        (told[7], "cannot be read"),
        (told[8], "`/` is a folder; it has"),
    ] {
        assert!(told.contains(expected), "{told}");
    }
    assert_eq!(told[9], "changed `/workspace/a.sh`");
    assert_eq!(told[10], "one\n2\nb");
    drop(environment);
    scene.close();
}

#[test]
fn a_patch_is_what_the_policy_left_of_the_repository() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, repositories) = instances(folder.path(), 1);
    let scene = Scene::new(Some(&repositories));
    let task = tasks(&rows).tasks()[0].clone();
    let reward = |commands: &[&str]| {
        let mut environment = scene.one(&task);
        for command in commands {
            let result = bash(&mut environment, command);
            assert!(!result.done, "{command}: {result:?}");
        }
        end(&submit(&mut environment))
    };
    let fix = format!("echo '{FIXED}' > src/twice.sh");
    let fix = fix.as_str();
    let passed = (true, Some(1.0), Some(EpisodeStatus::Passed));
    let failed = (true, Some(0.0), Some(EpisodeStatus::Failed));
    let invalid = (true, Some(0.0), Some(EpisodeStatus::Invalid));
    assert_eq!(reward(&[fix]), passed);
    // The task's environment is active; commits, staged files and other branches do not matter, nor does what is
    // built or ignored.
    let commit = "test \"$SET\" = by-the-task && git checkout -qb other && git add -A && \
                  git -c user.name=a -c user.email=a@b commit -qm mended && echo x > x.log && \
                  mkdir -p src/__pycache__ && head -c 100 /dev/urandom > src/__pycache__/twice.pyc";
    assert_eq!(reward(&[fix, commit]), passed);
    // Tests that are changed are restored.
    let cheat =
        "echo 'check() { echo \"PASSED $1\"; }' > tests/conftest.py; : > tests/test_twice.sh";
    assert_eq!(reward(&[cheat]), invalid);
    assert_eq!(reward(&[fix, cheat]), passed);
    assert_eq!(reward(&["true"]), invalid);
    assert_eq!(
        reward(&[&format!("echo '{WRONG} # no' > src/twice.sh")]),
        failed
    );
    // A `git` that says what the policy likes is believed for what it is: a patch, judged elsewhere.
    for breaks in [
        "rm -rf .git",
        "printf '#!/bin/sh\\nexit 1\\n' > $(command -v git)",
        "printf '#!/bin/sh\\necho PASSED\\n' > $(command -v git)",
        "rm -rf /testbed",
        "rm -f /bin/sh /usr/bin/sh",
        "git config core.fsmonitor 'touch /tmp/x'; git config diff.external false; chmod 000 .git/objects; \
         rm -rf .git/objects",
    ] {
        let (done, reward, _) = reward(&[fix, breaks]);
        assert_eq!((done, reward), (true, Some(0.0)), "{breaks}");
    }
    scene.close();
}

/// Whoever breaks a verifier that works otherwise has earned nothing; one that does not work has judged nobody.
#[test]
fn a_verifier_that_breaks_down_is_the_policys_doing_where_it_works_without() {
    let folder = tempfile::tempdir().unwrap();
    let task = |name: &str, script: &str| {
        let place = folder.path().join(name);
        write(
            &place.join("task.toml"),
            "[environment]\ndocker_image = \"a\"\n[verifier]\ntimeout_sec = 5\n",
        );
        write(&place.join("instruction.md"), "Do it.");
        write(&place.join("tests/test.sh"), script);
        tasks(&place).tasks()[0].clone()
    };
    let sound = task(
        "sound",
        "#!/bin/sh\n[ ! -e /workspace/settings ] || . /workspace/settings\necho 0.5 > /logs/verifier/reward.txt\n",
    );
    let broken = task("broken", "#!/bin/sh\nexit 1\n");
    let scene = Scene::new(None);
    for breaks in [
        "echo 'exit 1' > settings",
        "echo 'while :; do :; done' > settings",
        "rm -f /bin/sh /usr/bin/sh",
    ] {
        let mut environment = scene.one(&sound);
        bash(&mut environment, breaks);
        let result = submit(&mut environment);
        assert_eq!(
            end(&result),
            (true, Some(0.0), Some(EpisodeStatus::Failed)),
            "{breaks}"
        );
    }
    assert_eq!(submit(&mut scene.one(&sound)).reward, Some(0.5));
    let result = submit(&mut scene.one(&broken));
    assert_eq!(end(&result), (true, None, Some(EpisodeStatus::InfraError)));
    assert!(result.fault.is_some_and(|fault| fault.contains("reward")));
    scene.close();
}

/// Tests of a verifier keep whether they can be run.
#[test]
fn tests_of_a_verifier_arrive_as_they_are() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    write(
        &folder.path().join("task.toml"),
        "[environment]\ndocker_image = \"a\"\n",
    );
    write(&folder.path().join("instruction.md"), "Do it.");
    let check = folder.path().join("tests/lib/check");
    write(&check, "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n");
    fs_err::set_permissions(&check, std::fs::Permissions::from_mode(0o755)).unwrap();
    write(
        &folder.path().join("tests/test.sh"),
        "#!/bin/sh\n[ -x /tests/data ] || /tests/lib/check\n",
    );
    write(&folder.path().join("tests/data"), "not to be run");
    let scene = Scene::new(None);
    let task = tasks(folder.path()).tasks()[0].clone();
    assert_eq!(submit(&mut scene.one(&task)).reward, Some(1.0));
    scene.close();
}

/// What cannot be run is told before anything is started.
#[test]
fn what_cannot_be_run_is_named_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    write(&rows, &row("a__b-9").to_string());
    let instance = tasks(&rows).tasks()[0].clone();
    let refusal = |scene: &Scene, task: &Task| {
        let repository = task.repository.clone().expect("it needs a sandbox");
        scene.place.check(&repository).unwrap_err().to_string()
    };
    let scene = Scene::new(None);
    let told = refusal(&scene, &instance);
    assert!(told.contains("`actor.repositories`"), "{told}");
    scene.close();
    let scene = Scene::new(Some(folder.path()));
    let told = refusal(&scene, &instance);
    assert!(told.contains("a__b-9/testbed` is not there"), "{told}");
    let place = folder.path().join("gpu");
    write(
        &place.join("task.toml"),
        "[environment]\ndocker_image = \"a\"\ngpus = 1\n",
    );
    write(&place.join("instruction.md"), "Do it.");
    write(&place.join("tests/test.sh"), "#!/bin/sh\n");
    let told = refusal(&scene, &tasks(&place).tasks()[0]);
    assert!(told.contains("asks for a GPU"), "{told}");
    scene.close();
}

/// The policy and the verifier are who the task says: neither has rights over what is the other's, and the policy's
/// tools have none but its own.
#[test]
fn the_programs_of_a_task_are_of_the_users_that_it_names() {
    let folder = tempfile::tempdir().unwrap();
    write(
        &folder.path().join("task.toml"),
        "[environment]\ndocker_image = \"a\"\n[agent]\nuser = 1000\n[verifier]\nuser = \"nobody\"\n",
    );
    write(&folder.path().join("instruction.md"), "Do it.");
    write(
        &folder.path().join("tests/test.sh"),
        "#!/bin/sh\n[ \"$(id -u)$(cat /workspace/who)\" = 655341000 ] && r=1 || r=0\n\
         echo $r > /logs/verifier/reward.txt\n",
    );
    let scene = Scene::new(None);
    let task = tasks(folder.path()).tasks()[0].clone();
    let mut environment = scene.one(&task);
    bash(&mut environment, "id -u > who");
    let create = json!({"action": "create", "path": "/etc/new", "content": "x"});
    let result = play(&mut environment, "edit", create);
    assert!(said(&result).contains("Permission denied"), "{result:?}");
    let view = json!({"action": "view", "path": "who"});
    assert_eq!(said(&play(&mut environment, "edit", view)), "    1  1000");
    assert_eq!(submit(&mut environment).reward, Some(1.0));
    drop(environment);
    // A user that is not there is the task's fault.
    let text = "[environment]\ndocker_image = \"a\"\n[agent]\nuser = \"worker\"\n";
    write(&folder.path().join("task.toml"), text);
    let task = tasks(folder.path()).tasks()[0].clone();
    let mut environment = scene.one(&task);
    let turn = turn(&[("bash", json!({"command": "true"}))]);
    let error = environment.step(&turn).unwrap_err();
    let told = format!("{:?}", anyhow::Error::new(error));
    assert!(
        told.contains("worker") && told.contains("/etc/passwd"),
        "{told}"
    );
    drop(environment);
    scene.close();
}
