//! Many followers of one busy log.

use std::time::Duration;

use futures::StreamExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::tests::Writer;
use super::*;

const FOLLOWERS: usize = 200;
const LINES: usize = 6_000;
const ROTATE_EVERY: usize = 1_000;

/// Lines that a follower got, by number.
struct Got {
    lines: Vec<u8>,
    rest: Vec<u8>,
    bytes: usize,
}

impl Got {
    fn new() -> Self {
        Self {
            lines: vec![0; LINES],
            rest: Vec::new(),
            bytes: 0,
        }
    }

    fn take(&mut self, data: &[u8]) {
        self.bytes += data.len();
        self.rest.extend_from_slice(data);
        let end = self
            .rest
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |at| at + 1);
        for line in self.rest[..end]
            .split(|b| *b == b'\n')
            .filter(|l| !l.is_empty())
        {
            let number: usize = std::str::from_utf8(&line[..6]).unwrap().parse().unwrap();
            self.lines[number] += 1;
        }
        self.rest.drain(..end);
    }

    fn check(&self, who: usize) {
        let lost = self.lines.iter().filter(|times| **times == 0).count();
        let doubled = self.lines.iter().filter(|times| **times > 1).count();
        assert_eq!(
            (lost, doubled),
            (0, 0),
            "follower {who} lost and doubled lines"
        );
    }
}

/// 200 followers, of which one reads nothing until the writer has ended; the log is rotated and compressed under them, and
/// the runtime's last lines come to a file after it was replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_followers_get_every_line_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(dir.path());
    let hub = LogHub::default();
    let (end, ended) = tokio::sync::watch::channel(false);
    let mut followers = Vec::new();
    for who in 0..FOLLOWERS {
        let has_ended = ended.clone();
        let subscription = hub.subscribe(&writer.path, Box::new(move || *has_ended.borrow()));
        let options = LogOptions {
            follow: true,
            ..LogOptions::default()
        };
        let reader = LogReader::open(&writer.path, &options).unwrap();
        let stream = follow(reader, subscription, CancellationToken::new());
        let mut slow = (who == 0).then(|| ended.clone());
        followers.push(tokio::spawn(async move {
            if let Some(ended) = &mut slow {
                ended.wait_for(|ended| *ended).await.unwrap();
            }
            let mut got = Got::new();
            let mut stream = std::pin::pin!(stream);
            while let Some(data) = stream.next().await {
                got.take(&data.unwrap());
            }
            got
        }));
    }
    let began = Instant::now();
    let (writing, rotations) = tokio::task::spawn_blocking(move || {
        let filler = "x".repeat(80);
        let mut rotations = 0;
        for number in 0..LINES {
            let line = format!("2026-01-02T03:04:05.123456789Z stdout F {number:06} {filler}\n");
            let last = number % ROTATE_EVERY == ROTATE_EVERY - 1;
            if last && number + 1 < LINES {
                writer.rename(LINES.try_into().unwrap());
                let mut old = writer.reopen();
                rotations += 1;
                std::io::Write::write_all(&mut old, line.as_bytes()).unwrap();
            } else {
                writer.write(line.as_bytes());
            }
        }
        (began.elapsed(), rotations)
    })
    .await
    .unwrap();
    end.send(true).unwrap();
    let mut bytes = 0;
    for (who, follower) in followers.into_iter().enumerate() {
        let got = tokio::time::timeout(Duration::from_secs(120), follower);
        let got = got.await.unwrap().unwrap();
        got.check(who);
        bytes += got.bytes;
    }
    assert_eq!(hub.followers(), 0);
    let took = began.elapsed();
    let rate = bytes as f64 / took.as_secs_f64() / f64::from(1 << 20);
    println!(
        "{FOLLOWERS} followers, {LINES} lines written in {writing:.1?} with {rotations} rotations: \
         {} MiB given in {took:.1?}, {rate:.0} MiB/s",
        bytes >> 20,
    );
}
