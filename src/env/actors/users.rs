//! Who the programs of a Harbor task are: `user` of its agent and verifier, found in its root filesystem.

use std::path::Path;

use crate::actor::{Actor, ActorBackend, ActorError, TreeLimits, User};
use crate::task::harbor;

/// Where users have their numbers.
const USERS: &str = "/etc/passwd";
/// The most of it that is read.
const MAX_USERS: u64 = 1 << 20;

/// Returns the numbers of a user in an actor; none where the task names nobody, and where all users of the backend
/// are one.
///
/// As in Docker, a number that has no entry is of the group 0.
///
/// # Errors
///
/// Fails where the actor does. A name that is not there is as what cannot be read.
pub(super) fn find(
    backend: &dyn ActorBackend,
    actor: &dyn Actor,
    asked: Option<&harbor::User>,
) -> Result<Option<User>, ActorError> {
    let Some(asked) = asked.filter(|_| backend.capabilities().users) else {
        return Ok(None);
    };
    let limits = TreeLimits {
        bytes: MAX_USERS,
        entries: 1,
    };
    let text = match actor.get(Path::new(USERS), limits) {
        Ok(tree) => tree.file("passwd").map(<[u8]>::to_vec).unwrap_or_default(),
        Err(ActorError::Unreadable { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let found = find_in(&String::from_utf8_lossy(&text), asked);
    let user = found.ok_or_else(|| ActorError::Unreadable {
        path: USERS.into(),
        message: format!("the task's user {asked:?} is not there; add it to its image"),
    })?;
    Ok(Some(user))
}

fn find_in(text: &str, asked: &harbor::User) -> Option<User> {
    let number = match asked {
        harbor::User::Id(number) => Some(u32::try_from(*number).ok()?),
        harbor::User::Name(name) => name.parse().ok(),
    };
    let found = text.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let uid: u32 = fields.get(2)?.parse().ok()?;
        let is_asked = match (number, asked) {
            (Some(number), _) => uid == number,
            (None, harbor::User::Name(name)) => fields.first() == Some(&name.as_str()),
            (None, harbor::User::Id(_)) => false,
        };
        let gid = fields.get(3)?.parse().ok()?;
        is_asked.then_some(User { uid, gid })
    });
    found.or_else(|| number.map(|uid| User { uid, gid: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_the_numbers_of_their_entry() {
        let text =
            "root:x:0:0:root:/root:/bin/sh\nbad\nshort:x:9\nworker:x:1000:1001::/home:/bin/sh\n";
        let by_name = |name: &str| find_in(text, &harbor::User::Name(name.to_owned()));
        let by_id = |id| find_in(text, &harbor::User::Id(id));
        let worker = Some(User {
            uid: 1000,
            gid: 1001,
        });
        assert_eq!(by_name("worker"), worker);
        assert_eq!((by_name("1000"), by_id(1000)), (worker, worker));
        assert_eq!(by_id(7), Some(User { uid: 7, gid: 0 }));
        assert_eq!(by_id(0), Some(User { uid: 0, gid: 0 }));
        assert_eq!(
            (by_name("nobody"), by_name("short"), by_id(-1)),
            (None, None, None)
        );
    }
}
