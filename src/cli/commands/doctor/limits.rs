//! How many files this process may have open.

use rustix::process::{Resource, getrlimit};

use super::Scope;
use super::finding::Finding;

/// Sockets of a step's episodes, of servers and of shards of weights come to some hundreds.
const FILES: u64 = 1024;

pub(super) fn check(_scope: &Scope) -> Vec<Finding> {
    let limit = getrlimit(Resource::Nofile);
    vec![judge(limit.current, limit.maximum)]
}

/// Judges a limit and how far it may be raised; without number there is none.
fn judge(current: Option<u64>, most: Option<u64>) -> Finding {
    match current {
        Some(current) if current < FILES => {
            let fix = match most {
                Some(most) if most < FILES => format!(
                    "raise the hard limit, which is {most}: `nofile` in /etc/security/limits.conf, or \
                     `--ulimit nofile=4096` of a container"
                ),
                _ => "ulimit -n 4096".to_owned(),
            };
            let about = format!("{current} files may be open at a time, {FILES} are wanted");
            Finding::wrong("limits", about, fix)
        }
        Some(current) => Finding::fine("limits", format!("{current} files may be open at a time")),
        None => Finding::fine("limits", "files may be open without limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn what_is_too_low_is_raised_where_it_can_be() {
        assert_eq!(judge(Some(1024), Some(4096)).state, State::Fine);
        assert_eq!(judge(None, None).state, State::Fine);
        let low = judge(Some(256), Some(4096));
        assert_eq!(low.fix.as_deref(), Some("ulimit -n 4096"));
        let lower = judge(Some(64), Some(64)).fix.unwrap();
        assert!(lower.contains("hard limit, which is 64"), "{lower}");
    }
}
