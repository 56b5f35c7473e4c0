//! Detection of processes that the kernel killed because memory ran out, from its log.
//!
//! In: records of `/dev/kmsg`, in their order. Out: an [`OomKill`] for each OOM. Pure.
//!
//! A report has several records: `… invoked oom-killer: …`, figures of the cgroup, a summary (`oom-kill:constraint=…`)
//! and `… Killed process N (NAME) …`. Reports do not overlap, since the kernel kills under one lock, but records of others stand
//! between theirs. When many processes are killed within seconds, the kernel prints the last record of a report only.
//!
//! Names of processes and cgroups are what users made them: bytes, with commas, parentheses and whole phrases of a report. The kernel
//! cuts names of processes at 15 bytes, and a victim's cgroup is below the one whose limit was hit; by that a summary is cut
//! into its parts.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use memchr::memmem;

/// Bytes of the longest name of a process.
const MAX_NAME: usize = 15;
/// Bytes of the longest summary that is put together.
const MAX_SUMMARY: usize = 16 << 10;
/// A limit from which on there is none: the kernel prints the most it can count.
const UNLIMITED: u64 = 1 << 60;
const KIB: u64 = 1024;
const NAME_OF_TASK: &[u8] = b",task=";
const CGROUP_OF_TASK: &[u8] = b",task_memcg=/";

/// One record of the kernel's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number in this boot.
    pub sequence: u64,
    /// True if the kernel wrote it, not a process.
    pub of_kernel: bool,
    /// True if it continues a line.
    pub continued: bool,
    /// The text, as the kernel had it.
    pub text: Vec<u8>,
}

/// A process that the kernel killed for want of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomKill {
    /// Sequence number of the record of its end.
    pub sequence: u64,
    /// Process ID, in the node's namespace.
    pub pid: u32,
    /// Name of the process.
    pub name: Vec<u8>,
    /// Its anonymous memory in bytes.
    pub anon_rss: Option<u64>,
    /// Memory that ran out: the node's or a cgroup's.
    pub scope: Scope,
    /// The cgroup of the process.
    pub cgroup: Option<Vec<u8>>,
    /// The limit that was hit, in bytes; of a cgroup only.
    pub limit: Option<u64>,
}

/// Memory that ran out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The node's.
    Node,
    /// Memory of the cgroup at this path; `None` when the kernel did not print the path.
    Cgroup(Option<Vec<u8>>),
}

/// Reads one record of `/dev/kmsg`, `priority,sequence,µs,flags[,more];text`, and lines below that are left out.
pub fn record(bytes: &[u8]) -> Option<Record> {
    let (header, rest) = split(bytes, b";")?;
    let mut fields = header.split(|b| *b == b',');
    let priority = number(fields.next()?)?;
    let sequence = number(fields.next()?)?;
    let flags = fields.nth(1).unwrap_or_default();
    let text = rest.split(|b| *b == b'\n').next().unwrap_or_default();
    Some(Record {
        sequence,
        // The lowest three bits are the level, the rest the facility.
        of_kernel: priority >> 3 == 0,
        continued: matches!(flags, b"c" | b"+"),
        text: unescape(text),
    })
}

/// Names of the containers that `cgroup` may be of, by what runtimes name cgroups: `ID` and `cri-containerd-ID.scope`.
pub fn container_ids(cgroup: &str) -> impl Iterator<Item = &str> {
    cgroup.split('/').filter_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        part.rsplit('-').next().filter(|id| !id.is_empty())
    })
}

/// The summary of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Summary {
    scope: Scope,
    cgroup: Option<Vec<u8>>,
    /// Process ID and name; older kernels do not have them here.
    victim: Option<(u32, Vec<u8>)>,
}

/// Puts reports together.
#[derive(Clone, Debug, Default)]
pub struct Parser {
    summary: Option<Summary>,
    /// A summary whose end has not come yet.
    begun: Option<Vec<u8>>,
    /// The limit of the cgroup of this report.
    limit: Option<u64>,
    /// True if all processes of a cgroup are killed with the reported one.
    group: bool,
}

impl Parser {
    /// Takes the next record. Returns the kill when it completes the report of one. The rest of a cgroup that is killed as a
    /// whole (`memory.oom.group`) belongs to the first one.
    pub fn take(&mut self, record: &Record) -> Option<OomKill> {
        if !record.of_kernel {
            return None;
        }
        let text = record.text.as_slice();
        if let Some(begun) = self.begun.take().filter(|_| record.continued) {
            self.summarise([begun.as_slice(), text].concat());
            return None;
        }
        if memmem::find(text, b" invoked oom-killer: ").is_some() {
            *self = Self::default();
        } else if text.starts_with(b"oom-kill:constraint=") {
            self.group = false;
            self.summarise(text.to_vec());
        } else if let Some(usage) = text.strip_prefix(b"memory: usage ") {
            self.limit = limit(usage);
        } else if text.starts_with(b"Tasks in ") && text.ends_with(b" memory.oom.group set") {
            self.group = true;
        } else if let Some(summary) = legacy_summary(text) {
            self.summary = Some(summary);
        } else {
            return self.killed(record);
        }
        None
    }

    /// Forgets what was begun: records were lost.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    fn summarise(&mut self, text: Vec<u8>) {
        self.summary = summary(&text);
        if self.summary.is_none() && text.len() <= MAX_SUMMARY {
            self.begun = Some(text);
        }
    }

    fn killed(&mut self, record: &Record) -> Option<OomKill> {
        let killed = killed(&record.text)?;
        let summary = self.summary.take_if(|summary| summary.is_of(&killed));
        let (scope, cgroup) = match summary {
            Some(summary) => (summary.scope, summary.cgroup),
            None if self.group && killed.of_node != Some(true) => return None,
            None if killed.of_node? => (Scope::Node, None),
            None => (Scope::Cgroup(None), None),
        };
        let limit = match (&scope, &cgroup) {
            (Scope::Cgroup(_), Some(_)) => self.limit.take(),
            _ => None,
        };
        Some(OomKill {
            sequence: record.sequence,
            pid: killed.pid,
            name: killed.name,
            anon_rss: killed.anon_rss,
            scope,
            cgroup,
            limit: limit.filter(|limit| *limit < UNLIMITED),
        })
    }
}

impl Summary {
    /// Returns whether `killed` ends this report. The process that is killed may be another one of the same name: a
    /// thread that outlived its leader.
    fn is_of(&self, killed: &Killed) -> bool {
        let of_node = self.scope == Scope::Node;
        let same = (self.victim.as_ref())
            .is_none_or(|(pid, name)| *pid == killed.pid || *name == killed.name);
        same && killed.of_node.is_none_or(|killed| killed == of_node)
    }
}

/// `oom-kill:constraint=…,cpuset=C,mems_allowed=…,(oom_memcg=M|global_oom),task_memcg=T,task=NAME,pid=N,uid=U`. C has
/// no slash, M and T begin with one.
fn summary(text: &[u8]) -> Option<Summary> {
    let (rest, uid) = rsplit(text, b",uid=")?;
    number(uid)?;
    let (rest, pid) = rsplit(rest, b",pid=")?;
    let pid = u32::try_from(number(pid)?).ok()?;
    let window = rest.len().saturating_sub(MAX_NAME + NAME_OF_TASK.len());
    let at = window + memmem::find(rest.get(window..)?, NAME_OF_TASK)?;
    let (rest, name) = (rest.get(..at)?, rest.get(at + NAME_OF_TASK.len()..)?);
    let victim = Some((pid, name.to_vec()));
    if let Some((_, cgroup)) = split(rest, b",global_oom,task_memcg=/") {
        return Some(Summary {
            scope: Scope::Node,
            cgroup: Some(absolute(cgroup)),
            victim,
        });
    }
    let (_, groups) = split(rest, b",oom_memcg=/")?;
    // The victim's cgroup is the other one, or below it.
    let (limited, cgroup) = memmem::find_iter(groups, CGROUP_OF_TASK).find_map(|at| {
        let (limited, cgroup) = (groups.get(..at)?, groups.get(at + CGROUP_OF_TASK.len()..)?);
        let below = cgroup.strip_prefix(limited)?;
        (limited.is_empty() || below.first().is_none_or(|b| *b == b'/'))
            .then_some((limited, cgroup))
    })?;
    Some(Summary {
        scope: Scope::Cgroup(Some(absolute(limited))),
        cgroup: Some(absolute(cgroup)),
        victim,
    })
}

/// `Task in T killed as a result of limit of M` and `Out of memory: Kill process N (NAME) …`, of kernels before 4.20.
fn legacy_summary(text: &[u8]) -> Option<Summary> {
    if text.starts_with(b"Out of memory: Kill process ") {
        return Some(Summary {
            scope: Scope::Node,
            cgroup: None,
            victim: None,
        });
    }
    let text = text.strip_prefix(b"Task in /")?;
    let (cgroup, limited) = rsplit(text, b" killed as a result of limit of /")?;
    Some(Summary {
        scope: Scope::Cgroup(Some(absolute(limited))),
        cgroup: Some(absolute(cgroup)),
        victim: None,
    })
}

/// The last record of a report.
struct Killed {
    /// True if the node's memory ran out; `None` where the kernel does not report it.
    of_node: Option<bool>,
    pid: u32,
    name: Vec<u8>,
    anon_rss: Option<u64>,
}

/// `Memory cgroup out of memory: Killed process N (NAME) total-vm:…kB, anon-rss:…kB, …`
fn killed(text: &[u8]) -> Option<Killed> {
    let (before, rest) = split(text, b"Killed process ")?;
    let of_node = match before {
        b"" => None,
        b"Memory cgroup out of memory: " => Some(false),
        b"Out of memory: " | b"Out of memory (oom_kill_allocating_task): " => Some(true),
        _ => return None,
    };
    let (pid, rest) = split(rest, b" (")?;
    let pid = u32::try_from(number(pid)?).ok()?;
    // A name may hold what follows names.
    let ends = [&b") total-vm:"[..], b"), UID ", b")"];
    let end = ends.iter().find_map(|end| memmem::rfind(rest, end))?;
    let (name, figures) = (rest.get(..end)?, rest.get(end..)?);
    let anon_rss = split(figures, b" anon-rss:").and_then(|(_, rss)| kilobytes(rss));
    Some(Killed {
        of_node,
        pid,
        name: name.to_vec(),
        anon_rss,
    })
}

/// `65536kB, limit 65536kB, failcnt 37`
fn limit(usage: &[u8]) -> Option<u64> {
    let (_, limit) = split(usage, b"kB, limit ")?;
    kilobytes(limit)
}

/// Bytes of a number of kB that `text` begins with.
fn kilobytes(text: &[u8]) -> Option<u64> {
    let (number_of, _) = split(text, b"kB")?;
    Some(number(number_of)?.saturating_mul(KIB))
}

fn number(text: &[u8]) -> Option<u64> {
    // `parse` takes a sign, too.
    let digits = text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| digits)?;
    text.parse().ok()
}

fn absolute(path: &[u8]) -> Vec<u8> {
    [b"/", path].concat()
}

fn split<'a>(text: &'a [u8], at: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let found = memmem::find(text, at)?;
    Some((text.get(..found)?, text.get(found + at.len()..)?))
}

fn rsplit<'a>(text: &'a [u8], at: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let found = memmem::rfind(text, at)?;
    Some((text.get(..found)?, text.get(found + at.len()..)?))
}

/// Bytes that the kernel wrote as `\xHH`: those that cannot be printed, and the backslash.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let byte = after.strip_prefix(b"x").and_then(|hex| {
            let (high, low) = (hex_digit(*hex.first()?)?, hex_digit(*hex.get(1)?)?);
            (*first == b'\\').then_some((high << 4) | low)
        });
        plain.push(byte.unwrap_or(*first));
        rest = match byte {
            Some(_) => after.get(3..).unwrap_or_default(),
            None => after,
        };
    }
    plain
}

fn hex_digit(digit: u8) -> Option<u8> {
    let value = char::from(digit).to_digit(16)?;
    u8::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POD: &str = "/kubepods/burstable/pod12-ab/c1";

    fn all(texts: &[&str]) -> Vec<OomKill> {
        let mut parser = Parser::default();
        let records = texts.iter().enumerate().map(|(n, text)| {
            // What begins with a comma is a piece that came late.
            let flags = if text.starts_with(',') { "c" } else { "-" };
            record(format!("6,{n},77,{flags},caller=T1;{text}\n SUBSYSTEM=x\n").as_bytes()).unwrap()
        });
        records.filter_map(|record| parser.take(&record)).collect()
    }

    fn summary_of(scope: &str, cgroup: &str, name: &str, pid: u32) -> String {
        format!(
            "oom-kill:constraint=CONSTRAINT_X,nodemask=(null),cpuset=c1,mems_allowed=0,{scope},task_memcg={cgroup},task={name},pid={pid},uid=0"
        )
    }

    fn in_pod(name: &str, pid: u32) -> String {
        summary_of(&format!("oom_memcg={POD}"), POD, name, pid)
    }

    fn end(name: &str, pid: u32) -> String {
        format!(
            "Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:9000kB, anon-rss:64kB, file-rss:1kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0"
        )
    }

    #[test]
    fn a_report_of_a_cgroup_names_process_memory_and_limit() {
        let kills = all(&[
            "sh invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
            "eth0: link is up",
            "memory: usage 65536kB, limit 65536kB, failcnt 37",
            "swap: usage 0kB, limit 1kB, failcnt 0",
            &in_pod("dd", 7),
            "eth0: link is down",
            &end("dd", 7),
        ]);
        let wanted = OomKill {
            sequence: 6,
            pid: 7,
            name: b"dd".to_vec(),
            anon_rss: Some(64 << 10),
            scope: Scope::Cgroup(Some(POD.into())),
            cgroup: Some(POD.into()),
            limit: Some(64 << 20),
        };
        assert_eq!(kills, [wanted]);
    }

    #[test]
    fn the_node_is_out_of_memory_with_and_without_a_summary() {
        let last = "Out of memory: Killed process 9 (a) total-vm:1kB, anon-rss:2kB";
        for texts in [
            vec![last],
            vec![&summary_of("global_oom", POD, "a", 9), last],
        ] {
            let kills = all(&texts);
            assert_eq!(kills.len(), 1);
            assert_eq!((&kills[0].scope, kills[0].pid), (&Scope::Node, 9));
            let cgroup = (texts.len() == 2).then(|| POD.as_bytes().to_vec());
            assert_eq!(kills[0].cgroup, cgroup);
        }
    }

    #[test]
    fn names_and_cgroups_may_hold_what_reports_are_made_of() {
        for name in [
            "a,pid=1,uid=0",
            ") total-vm:1kB",
            "x) (y",
            ",task=z",
            "\\x1b\\xe9\\x5cx41",
            "",
        ] {
            let kills = all(&[&in_pod(name, 7), &end(name, 7)]);
            assert_eq!(kills.len(), 1, "{name}");
            assert_eq!(kills[0].name, unescape(name.as_bytes()), "{name}");
            assert_eq!(kills[0].cgroup.as_deref(), Some(POD.as_bytes()), "{name}");
        }
        let sly = format!("{POD}/a,task_memcg=/kubepods/pod99");
        let kills = all(&[
            &summary_of(&format!("oom_memcg={sly}"), &sly, "a", 7),
            &end("a", 7),
        ]);
        assert_eq!(kills[0].cgroup.as_deref(), Some(sly.as_bytes()));
        assert_eq!(unescape(b"\\x1b\\xe9\\x5cx41\\x4"), b"\x1b\xe9\\x41\\x4");
    }

    #[test]
    fn a_summary_in_pieces_is_put_together() {
        let whole = in_pod("dd", 7);
        let (head, tail) = whole.split_at(whole.find(",oom_memcg").unwrap());
        let kills = all(&[head, tail, &end("dd", 7)]);
        assert_eq!(kills[0].cgroup.as_deref(), Some(POD.as_bytes()));
    }

    #[test]
    fn a_cgroup_that_is_killed_as_a_whole_is_one_kill() {
        let kills = all(&[
            &in_pod("dd", 7),
            &end("dd", 7),
            "Tasks in /kubepods are going to be killed due to memory.oom.group set",
            &end("dd", 7),
            &end("sh", 8),
            &in_pod("cc", 9),
            &end("cc", 9),
        ]);
        let pids: Vec<u32> = kills.iter().map(|kill| kill.pid).collect();
        assert_eq!(pids, [7, 9]);
    }

    #[test]
    fn a_kill_does_not_take_the_report_of_another() {
        let kills = all(&[&in_pod("dd", 7), &end("cc", 8)]);
        assert_eq!(
            (&kills[0].scope, &kills[0].cgroup),
            (&Scope::Cgroup(None), &None)
        );
    }

    #[test]
    fn older_kernels_are_understood() {
        let kills = all(&[
            "dd invoked oom-killer: gfp_mask=0x1, order=0",
            &format!("Task in {POD} killed as a result of limit of /kubepods/burstable/pod12-ab"),
            "memory: usage 8kB, limit 9007199254740988kB, failcnt 1",
            "Memory cgroup out of memory: Kill process 7 (dd) score 1000 or sacrifice child",
            "Killed process 7 (dd), UID 0, total-vm:5kB, anon-rss:3kB, file-rss:1kB",
        ]);
        assert_eq!(kills.len(), 1);
        assert_eq!((kills[0].anon_rss, kills[0].limit), (Some(3 << 10), None));
        assert_eq!(kills[0].cgroup.as_deref(), Some(POD.as_bytes()));
        let kills = all(&[
            "Out of memory: Kill process 7 (dd) score 1000 or sacrifice child",
            "Killed process 7 (dd) total-vm:5kB, anon-rss:3kB, file-rss:1kB",
        ]);
        assert_eq!(kills[0].scope, Scope::Node);
    }

    #[test]
    fn what_processes_write_to_the_log_counts_for_nothing() {
        let bytes = format!("12,5,77,-;{}\n", "Out of memory: Killed process 1 (init)");
        let record = record(bytes.as_bytes()).unwrap();
        assert_eq!(Parser::default().take(&record), None);
    }

    #[test]
    fn containers_are_found_in_the_names_of_their_cgroups() {
        for path in [
            "/kubepods/pod1/abc",
            "/kubepods-pod1.slice/cri-containerd-abc.scope/init",
        ] {
            assert!(container_ids(path).any(|id| id == "abc"), "{path}");
        }
    }

    proptest! {
        #[test]
        fn no_record_panics_and_none_hides_the_next_kill(
            noise in proptest::collection::vec(
                (
                    proptest::sample::select(vec![
                        "", "oom-kill:constraint=", ",oom_memcg=/a,task_memcg=/a,task=b,pid=1,uid=2", "Task in /",
                        "memory: usage 1kB, limit ", "Killed process 1 (", "a invoked oom-killer: ",
                        "Memory cgroup out of memory: Killed process ",
                    ]),
                    proptest::collection::vec(any::<u8>(), 0..40),
                    proptest::sample::select(vec!["6,1,2,-;", "6,1,2,c;", "", ";", "6,", "9,1,2,-;"]),
                ),
                0..30,
            ),
        ) {
            let mut parser = Parser::default();
            for (begin, tail, header) in noise {
                let bytes = [header.as_bytes(), begin.as_bytes(), &tail].concat();
                if let Some(record) = record(&bytes) {
                    parser.take(&record);
                }
            }
            let mut last = None;
            for text in ["a invoked oom-killer: x".to_owned(), in_pod("dd", 7), end("dd", 7)] {
                let record = record(format!("6,8,9,-;{text}").as_bytes()).unwrap();
                last = parser.take(&record);
            }
            prop_assert_eq!(last.and_then(|kill| kill.cgroup), Some(POD.as_bytes().to_vec()));
        }
    }
}
