//! Limit of the files that the agent may have open. Upstream: `rlimit.SetNumFiles`.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{debug, warn};

/// Sets the limit to `wanted`. An agent that may not raise it has as many as it may.
pub(super) fn limit(wanted: u64) {
    let (soft, hard) = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok(limits) => limits,
        Err(error) => {
            return warn!(%error, "maxOpenFiles: cannot read the limit, it stays as it is");
        }
    };
    let set = |files, most| setrlimit(Resource::RLIMIT_NOFILE, files, most);
    let Err(error) = set(wanted, wanted) else {
        debug!(wanted, soft, hard, "set the limit of open files");
        return;
    };
    warn!(
        wanted,
        allowed = hard,
        %error,
        "maxOpenFiles: the agent may not have so many files open; it has as many as it may"
    );
    if let Err(error) = set(hard.min(wanted), hard) {
        warn!(%error, "maxOpenFiles: the limit stays as it was");
    }
}
