//! What the next process of the server has of a directory: the writer of its temporary files with its lock, and which names
//! to look for.

use serde::{Deserialize, Serialize};

use super::base::WriterState;
use super::files::Files;
use kvtier_l2::{AdapterHandOver, ErrorKind, L2Error};

/// State of a directory. A directory that is only read has no writer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DirectoryState {
    writer: Option<WriterState>,
    /// Whether other names and other layouts are looked for.
    others: (bool, bool),
}

fn refused(files: &Files, what: impl std::fmt::Display) -> L2Error {
    let path = files.base.path().display();
    L2Error::new(ErrorKind::Refused, format!("base_path {path}: {what}"))
}

/// Returns the state and the lock.
pub(super) fn hand_over(files: &Files) -> Result<AdapterHandOver, L2Error> {
    let own = (!files.base.is_read_only()).then(|| files.base.hand_over());
    let own = own.transpose().map_err(|error| refused(files, error))?;
    let (writer, lock) = own.unzip();
    let state = DirectoryState {
        writer,
        others: files.others.get(),
    };
    Ok(AdapterHandOver {
        state: serde_json::to_value(state).map_err(|error| refused(files, error))?,
        descriptors: lock.flatten().into_iter().collect(),
    })
}

/// Goes on with the state and the lock.
pub(super) fn adopt(files: &Files, mut handed: AdapterHandOver) -> Result<(), L2Error> {
    let state = serde_json::from_value::<DirectoryState>(handed.state);
    let DirectoryState { writer, others } = state.map_err(|error| refused(files, error))?;
    let lock = handed.descriptors.pop();
    let fits = writer.is_some() != files.base.is_read_only() && handed.descriptors.is_empty();
    if !fits || (writer.is_none() && lock.is_some()) {
        return Err(refused(files, "it has another number of locks"));
    }
    if let Some(writer) = writer {
        let adopted = files.base.adopt(writer, lock);
        adopted.map_err(|error| refused(files, error))?;
    }
    files.others.set(others.0, others.1);
    Ok(())
}
