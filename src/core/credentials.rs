//! Choice of the node's credentials, the next step to get others, and the manual recovery where that fails.
//!
//! The input is the validity of the client certificate, the clocks, and the state of the credentials that may ask for
//! another certificate. The output is the next step, and its explanation for people. Pure.
//!
//! Two credentials may ask for a certificate: those of the bootstrap kubeconfig, and the lifeline, which lasts longer
//! than any certificate of the node and has no other right. The lifeline is for a certificate that has expired: a node
//! that never had one is introduced by the bootstrap kubeconfig alone.
//!
//! **Invariant:** nothing is concluded for good from a clock. Each step is decided anew, and the API server's clock
//! counts as long as it is known.

/// Largest accepted difference of two clocks, in seconds.
pub const MAX_SKEW: i64 = 300;
/// 2025-01-01, in seconds since 1970: a clock that is before it was never set.
pub const EARLIEST: i64 = 1_735_689_600;

/// Validity of a certificate, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first second.
    pub from: i64,
    /// The second in which it has expired.
    pub until: i64,
}

/// Readings of the clocks, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    /// The clock of this machine.
    pub own: i64,
    /// Clock of the API server, if it has answered in this run of the agent.
    pub server: Option<i64>,
}

impl Time {
    /// Returns the time by which certificates are judged: the server's, which judges them too, else the own one.
    pub fn judge(self) -> i64 {
        self.server.unwrap_or(self.own)
    }

    /// Returns whether the clock of this machine is wrong, as far as that can be known.
    pub fn is_wrong(self) -> bool {
        let apart = self.server.map(|server| (server - self.own).abs());
        self.own < EARLIEST || apart.is_some_and(|apart| apart > MAX_SKEW)
    }
}

/// Identity that the node uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// No identity yet: there is no kubeconfig.
    Nobody,
    /// An identity without a certificate: a token, or a program that gives credentials.
    Uncertified,
    /// The identity in its certificate.
    Certified(Validity),
}

/// Credentials that may ask for a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// There are none.
    #[default]
    NotConfigured,
    /// They were not tried in this round.
    Ready,
    /// In this round the server has given no answer, or not yet.
    Silent,
    /// In this round they were refused, or cannot be read.
    Failed,
}

/// Input of the decision on the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// The clocks.
    pub time: Time,
    /// Identity that the node uses.
    pub client: Client,
    /// Time at which the certificate is renewed, in seconds since 1970; `None` if it is not renewed.
    pub renewal: Option<i64>,
    /// The bootstrap kubeconfig.
    pub bootstrap: Source,
    /// The lifeline.
    pub lifeline: Source,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Uses what there is.
    Use,
    /// Asks for the next certificate by the rights of the present one.
    Renew,
    /// Asks for a certificate with the bootstrap kubeconfig.
    Bootstrap,
    /// Asks for a certificate with the lifeline.
    Lifeline,
    /// Tries all of them again soon: the server did not answer one of them.
    Again,
    /// Waits for the clock: the certificate is not good yet.
    WaitForClock,
    /// Says what is to be done, and tries all of them again later.
    Stuck,
}

/// Decides the next step.
pub fn next(situation: &Situation) -> Next {
    let now = situation.time.judge();
    let lifeline = match situation.client {
        Client::Uncertified => return Next::Use,
        Client::Certified(validity) if now < validity.from => return Next::WaitForClock,
        Client::Certified(validity) if now < validity.until => {
            let is_due = situation.renewal.is_some_and(|at| now >= at);
            return if is_due { Next::Renew } else { Next::Use };
        }
        Client::Certified(_) => situation.lifeline,
        Client::Nobody => Source::NotConfigured,
    };
    match (situation.bootstrap, lifeline) {
        (Source::Ready, _) => Next::Bootstrap,
        (_, Source::Ready) => Next::Lifeline,
        (Source::Silent, _) | (_, Source::Silent) => Next::Again,
        _ => Next::Stuck,
    }
}

/// Failed attempt to get a certificate, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The kubeconfig.
    pub path: String,
    /// Reason for which they give no certificate.
    pub why: String,
}

/// A node that cannot get a certificate by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Name of the node.
    pub node: String,
    /// Time at which its certificate expired; `None` if it never had one.
    pub expired: Option<i64>,
    /// The clocks.
    pub time: Time,
    /// The bootstrap kubeconfig, if there is one.
    pub bootstrap: Option<Tried>,
    /// The lifeline, if there is one.
    pub lifeline: Option<Tried>,
}

/// Suggested path of a bootstrap kubeconfig if none is configured.
const BOOTSTRAP_PATH: &str = "/etc/holdfast/bootstrap.kubeconfig";
/// The most of an error that is shown, in characters.
const WHY_LIMIT: usize = 160;

impl Trouble {
    /// Says what is wrong and which commands end it. The text stays the same until something changes, unless a clock
    /// is wrong.
    pub fn instructions(&self) -> String {
        let mut text = match self.expired {
            Some(at) => format!(
                "the client certificate of node {} expired at {}",
                self.node,
                date(at)
            ),
            None => format!("node {} has no client certificate", self.node),
        };
        let mut add = |part: &str| text.push_str(part);
        match &self.bootstrap {
            Some(tried) => add(&format!(
                "; bootstrap kubeconfig {}: {}",
                tried.path,
                short(&tried.why)
            )),
            None => add("; there is no bootstrap kubeconfig"),
        }
        match &self.lifeline {
            Some(tried) => add(&format!("; lifeline {}: {}", tried.path, short(&tried.why))),
            None if self.expired.is_some() => add("; there is no lifeline"),
            None => {}
        }
        if self.time.is_wrong() {
            add(&format!("; {}", clocks(self.time)));
        }
        let path = self.bootstrap.as_ref().map(|tried| tried.path.as_str());
        add(&format!(
            ". To end this, run `kubeadm token create --print-join-command` on a control plane (without kubeadm: kubectl \
             apply -f contrib/cluster/bootstrap-token.yaml), and write its server, CA and token to {} on this node \
             (as contrib/cluster/bootstrap.kubeconfig, mode 0600). ",
            path.unwrap_or(BOOTSTRAP_PATH)
        ));
        match path {
            Some(_) => add("It is used within 10 s: no restart is needed"),
            None => add(&format!(
                "Then add --bootstrap-kubeconfig={BOOTSTRAP_PATH} to HOLDFAST_FLAGS in /etc/default/holdfast and run \
                 `systemctl restart holdfast`: pods run on"
            )),
        }
        text
    }
}

/// Says that a certificate is not good yet and that the clock is what is to be set.
pub fn not_yet(validity: Validity, time: Time) -> String {
    format!(
        "the client certificate is not valid before {}: {}. Set it (`timedatectl`, or wait for NTP): nothing else is \
         needed, and no restart",
        date(validity.from),
        clocks(time)
    )
}

/// Says what the clocks show.
fn clocks(time: Time) -> String {
    let mut text = format!("the clock of this machine says {}", date(time.own));
    if let Some(server) = time.server {
        text.push_str(&format!(", that of the API server {}", date(server)));
    }
    if time.is_wrong() {
        text.push_str(", so it is wrong");
    }
    text
}

fn short(why: &str) -> String {
    match why.char_indices().nth(WHY_LIMIT) {
        Some((end, _)) => format!("{}…", why.get(..end).unwrap_or_default()),
        None => why.to_owned(),
    }
}

fn date(seconds: i64) -> String {
    match jiff::Timestamp::from_second(seconds) {
        Ok(at) => at.to_string(),
        Err(_) => format!("@{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86_400;
    /// 2026-06-01.
    const NOW: i64 = 1_780_272_000;
    const GOOD: Client = Client::Certified(Validity {
        from: NOW - 100 * DAY,
        until: NOW + 265 * DAY,
    });
    const EXPIRED: Client = Client::Certified(Validity {
        from: NOW - 400 * DAY,
        until: NOW - 35 * DAY,
    });

    fn situation(client: Client, own: i64, server: Option<i64>) -> Situation {
        Situation {
            time: Time { own, server },
            client,
            renewal: None,
            bootstrap: Source::NotConfigured,
            lifeline: Source::NotConfigured,
        }
    }

    #[test]
    fn the_lifeline_is_for_an_expired_certificate_that_the_bootstrap_does_not_replace() {
        use Source::{Failed, NotConfigured, Ready, Silent};
        for (bootstrap, lifeline, expected) in [
            (NotConfigured, NotConfigured, Next::Stuck),
            (Ready, NotConfigured, Next::Bootstrap),
            (Ready, Ready, Next::Bootstrap),
            (Ready, Failed, Next::Bootstrap),
            (Failed, Ready, Next::Lifeline),
            (Silent, Ready, Next::Lifeline),
            (NotConfigured, Ready, Next::Lifeline),
            (Failed, NotConfigured, Next::Stuck),
            (NotConfigured, Failed, Next::Stuck),
            (Failed, Failed, Next::Stuck),
            // A server that is away says nothing about anybody's rights.
            (Silent, NotConfigured, Next::Again),
            (NotConfigured, Silent, Next::Again),
            (Silent, Silent, Next::Again),
            (Failed, Silent, Next::Again),
            (Silent, Failed, Next::Again),
        ] {
            let mut now = situation(EXPIRED, NOW, None);
            (now.bootstrap, now.lifeline) = (bootstrap, lifeline);
            assert_eq!(next(&now), expected, "{bootstrap:?} {lifeline:?}");
            now.client = GOOD;
            assert_eq!(next(&now), Next::Use, "{bootstrap:?} {lifeline:?}");
            now.client = Client::Uncertified;
            assert_eq!(next(&now), Next::Use, "{bootstrap:?} {lifeline:?}");
            // Who never had a certificate has no use for a lifeline.
            now.client = Client::Nobody;
            let expected = match bootstrap {
                Ready => Next::Bootstrap,
                Silent => Next::Again,
                NotConfigured | Failed => Next::Stuck,
            };
            assert_eq!(next(&now), expected, "{bootstrap:?} {lifeline:?}");
        }
    }

    #[test]
    fn a_certificate_is_judged_by_the_clock_of_the_server_as_long_as_that_is_known() {
        let year = 365 * DAY;
        for (client, own, server, expected) in [
            (GOOD, NOW, None, Next::Use),
            (GOOD, NOW, Some(NOW + 10), Next::Use),
            (EXPIRED, NOW, None, Next::Lifeline),
            // This machine's clock is ahead: the certificate is good.
            (GOOD, NOW + year, None, Next::Lifeline),
            (GOOD, NOW + year, Some(NOW), Next::Use),
            // It is behind: the server does not take the certificate any more.
            (EXPIRED, NOW - 100 * DAY, None, Next::Use),
            (EXPIRED, NOW - 100 * DAY, Some(NOW), Next::Lifeline),
            // It was never set.
            (GOOD, 600, None, Next::WaitForClock),
            (EXPIRED, 600, None, Next::WaitForClock),
            (GOOD, 600, Some(NOW), Next::Use),
        ] {
            let mut now = situation(client, own, server);
            now.lifeline = Source::Ready;
            assert_eq!(next(&now), expected, "{client:?} {own} {server:?}");
        }
    }

    #[test]
    fn a_certificate_is_renewed_by_its_own_rights_while_it_has_them() {
        let mut now = situation(GOOD, NOW, None);
        (now.bootstrap, now.lifeline) = (Source::Ready, Source::Ready);
        for (renewal, expected) in [
            (None, Next::Use),
            (Some(NOW + 1), Next::Use),
            (Some(NOW), Next::Renew),
        ] {
            now.renewal = renewal;
            assert_eq!(next(&now), expected, "{renewal:?}");
        }
        now.client = EXPIRED;
        assert_eq!(next(&now), Next::Bootstrap);
    }

    fn trouble() -> Trouble {
        Trouble {
            node: "n1".to_owned(),
            expired: Some(NOW - 35 * DAY),
            time: Time {
                own: NOW,
                server: None,
            },
            bootstrap: None,
            lifeline: None,
        }
    }

    #[test]
    fn the_instructions_are_complete_commands_for_what_is_configured() {
        let text = trouble().instructions();
        for part in [
            "node n1 expired at 2026-04-27T00:00:00Z",
            "there is no bootstrap kubeconfig",
            "there is no lifeline",
            "`kubeadm token create --print-join-command`",
            "contrib/cluster/bootstrap-token.yaml",
            "to /etc/holdfast/bootstrap.kubeconfig",
            "--bootstrap-kubeconfig=/etc/holdfast/bootstrap.kubeconfig",
            "`systemctl restart holdfast`",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("clock"), "{text}");

        let tried = |path: &str, why: &str| {
            Some(Tried {
                path: path.to_owned(),
                why: why.to_owned(),
            })
        };
        let configured = Trouble {
            bootstrap: tried("/etc/b", "Unauthorized"),
            lifeline: tried("/etc/l", &"x".repeat(5000)),
            ..trouble()
        };
        let text = configured.instructions();
        for part in [
            "bootstrap kubeconfig /etc/b: Unauthorized",
            "lifeline /etc/l: x",
            "token to /etc/b",
            "no restart is needed",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("systemctl"), "{text}");
        // The message of an event has 1024 bytes.
        assert!(text.len() < 1024, "{}", text.len());
    }

    #[test]
    fn a_wrong_clock_is_named_with_both_times() {
        let mut wrong = trouble();
        wrong.time.server = Some(NOW - 400 * DAY);
        let text = wrong.instructions();
        for part in ["2026-06-01", "2025-04-27", "so it is wrong"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let Client::Certified(validity) = GOOD else {
            unreachable!()
        };
        let unset = Time {
            own: 600,
            server: None,
        };
        let text = not_yet(validity, unset);
        for part in ["1970-01-01T00:10:00Z", "2026-02-21", "no restart"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
