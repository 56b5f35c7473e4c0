//! Pictures of a restart, drawn from what a run measured: when agent and containers ran, and what the agent used.
//!
//! `make figures` runs this with the release binary and more pods, and writes `docs/pictures`. Nothing in the pictures is made up: a
//! bar is a process's life, by the runtime's times or this test's clock; a line is what `/proc` said.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use holdfast::kuberuntime::cri::v1::ContainerState;
use holdfast_testkit::containerd::Version;

use crate::agent_process::Agent;
use crate::world::{FOREVER, World, ids};

/// Width of a picture, and of what is left of its axis.
const WIDTH: f64 = 900.0;
const LEFT: f64 = 150.0;

/// Seconds since the epoch.
fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("after 1970").as_secs_f64()
}

fn seconds(nanos: i64) -> f64 {
    Duration::from_nanos(u64::try_from(nanos).unwrap()).as_secs_f64()
}

/// A container's life: begin, and end if it has ended.
#[derive(Clone, Copy, Debug)]
struct Life {
    begin: f64,
    end: Option<f64>,
}

/// What was measured at one moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: f64,
    mib: f64,
    /// Processor time so far, in seconds.
    cpu: f64,
}

/// All that is measured in a run.
struct Run {
    world: World,
    /// Lives of the agent's processes.
    agents: Vec<Life>,
    /// Samples of each of them.
    samples: Vec<Vec<Sample>>,
    /// Attempts of the container that fails.
    flaky: BTreeMap<u32, Life>,
}

impl Run {
    /// Reads the agent's use and the attempts of the failing container, until the question has an answer.
    fn observe<T>(&mut self, agent: Option<&Agent>, mut ask: impl FnMut(&Self) -> Option<T>) -> T {
        let patience = Instant::now();
        loop {
            if let Some(agent) = agent {
                let process = procfs::process::Process::new(i32::try_from(agent.pid()).unwrap());
                let stat = process.and_then(|process| process.stat()).unwrap();
                let small = |n: u64| f64::from(u32::try_from(n).unwrap());
                let sample = Sample {
                    at: now(),
                    mib: small(stat.rss) * small(procfs::page_size()) / 1_048_576.0,
                    cpu: small(stat.utime + stat.stime) / small(procfs::ticks_per_second()),
                };
                self.samples.last_mut().unwrap().push(sample);
            }
            for seen in self.world.containers() {
                // What has ended may be removed while it is inspected.
                if seen.pod != "flaky" || self.end_of(seen.attempt).is_some() {
                    continue;
                }
                let status = self.world.inspect(&seen.id);
                if status.started_at == 0 {
                    continue;
                }
                let ended = status.state == ContainerState::ContainerExited as i32;
                let life = Life {
                    begin: seconds(status.started_at),
                    end: ended.then(|| seconds(status.finished_at)),
                };
                self.flaky.insert(seen.attempt, life);
            }
            if let Some(answer) = ask(&*self) {
                return answer;
            }
            assert!(
                patience.elapsed() < Duration::from_secs(150),
                "{:?}",
                self.flaky
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn start(&mut self) -> Agent {
        self.agents.push(Life {
            begin: now(),
            end: None,
        });
        self.samples.push(Vec::new());
        self.world.start()
    }

    fn end_of(&self, attempt: u32) -> Option<f64> {
        self.flaky.get(&attempt)?.end
    }
}

/// An SVG under construction.
struct Picture {
    text: String,
    /// Begin and end of the axis of time.
    from: f64,
    to: f64,
}

impl Picture {
    fn new(title: &str, height: f64, from: f64, to: f64) -> Self {
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
        );
        writeln!(
            text,
            "<text x=\"10\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{title}</text>"
        )
        .unwrap();
        Self { text, from, to }
    }

    fn x(&self, at: f64) -> f64 {
        LEFT + (at - self.from) / (self.to - self.from) * (WIDTH - LEFT - 20.0)
    }

    fn label(&mut self, x: f64, y: f64, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(self.text, "<text x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>").unwrap();
    }

    fn bar(&mut self, y: f64, life: Life, color: &str, tip: &str) {
        let (begin, end) = (self.x(life.begin), self.x(life.end.unwrap_or(self.to)));
        let width = (end - begin).max(1.0);
        writeln!(
            self.text,
            "<rect x=\"{begin:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"{color}\"><title>{tip}</title></rect>"
        )
        .unwrap();
    }

    fn upright(&mut self, at: f64, top: f64, bottom: f64) {
        let x = self.x(at);
        writeln!(
            self.text,
            "<line x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#c00\" stroke-dasharray=\"4 3\"/>"
        )
        .unwrap();
    }

    /// The axis of time, with a mark every five seconds.
    fn axis(&mut self, y: f64) {
        let mut at = 0.0;
        while self.from + at <= self.to {
            let x = self.x(self.from + at);
            writeln!(
                self.text,
                "<line x1=\"{x:.1}\" y1=\"{y}\" x2=\"{x:.1}\" y2=\"{}\" stroke=\"#000\"/>\n<text x=\"{x:.1}\" y=\"{}\" \
                 text-anchor=\"middle\">{at:.0} s</text>",
                y + 4.0,
                y + 18.0
            )
            .unwrap();
            at += 5.0;
        }
    }

    /// A line through points, scaled so that `most` is `height` above `bottom`.
    fn curve(&mut self, points: &[(f64, f64)], most: f64, bottom: f64, height: f64, color: &str) {
        let points: Vec<String> = points
            .iter()
            .map(|(at, value)| format!("{:.1},{:.1}", self.x(*at), bottom - value / most * height))
            .collect();
        writeln!(
            self.text,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{}\"/>",
            points.join(" ")
        )
        .unwrap();
    }

    fn end(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }
}

/// The agent and two containers over time.
fn timeline(run: &Run, steady: Life, from: f64, to: f64, made_by: &str) -> String {
    let mut picture = Picture::new(
        "A restart of the agent, and a crash-loop back-off",
        230.0,
        from,
        to,
    );
    picture.label(10.0, 62.0, "agent");
    picture.label(10.0, 102.0, "container of \"hello\"");
    picture.label(10.0, 142.0, "container of \"flaky\"");
    for life in &run.agents {
        let tip = format!("{:.1} s", life.end.unwrap_or(to) - life.begin);
        picture.bar(48.0, *life, "#4878a8", &tip);
    }
    picture.bar(
        88.0,
        steady,
        "#5a9a5a",
        "one process, the same container ID",
    );
    let attempts: Vec<(u32, Life)> = run.flaky.iter().map(|(n, life)| (*n, *life)).collect();
    // The first restart has no back-off.
    for pair in attempts.windows(2).skip(1) {
        let (Some(begin), end) = (pair[0].1.end, pair[1].1.begin) else {
            continue;
        };
        let wait = Life {
            begin,
            end: Some(end),
        };
        picture.bar(128.0, wait, "#e8e0c0", "back-off");
        picture.label(
            picture.x(begin) + 6.0,
            142.0,
            &format!("back-off {:.1} s", end - begin),
        );
    }
    for (attempt, life) in &attempts {
        picture.bar(128.0, *life, "#c07030", &format!("attempt {attempt}"));
    }
    let killed = run.agents[0].end.unwrap();
    picture.upright(killed, 34.0, 160.0);
    picture.label(picture.x(killed) + 4.0, 40.0, "kill -9");
    picture.axis(166.0);
    picture.label(10.0, 206.0, made_by);
    picture.label(10.0, 222.0, "The kubelet is not drawn: it was not measured. docs/comparison.md has what its source says.");
    picture.end()
}

/// Memory and processor time of the agent over time.
fn usage(run: &Run, pods: usize, from: f64, to: f64, made_by: &str) -> String {
    let title =
        format!("Memory and processor time of the agent with {pods} pods, across a restart");
    let mut picture = Picture::new(&title, 330.0, from, to);
    let memory: Vec<Vec<(f64, f64)>> = run
        .samples
        .iter()
        .map(|samples| samples.iter().map(|s| (s.at, s.mib)).collect())
        .collect();
    let processor: Vec<Vec<(f64, f64)>> = run
        .samples
        .iter()
        .map(|samples| {
            // Of a second each: the kernel counts in hundredths of one.
            let of_a_second = samples.iter().filter_map(|sample| {
                let later = samples.iter().find(|s| s.at >= sample.at + 1.0)?;
                let percent = (later.cpu - sample.cpu) / (later.at - sample.at) * 100.0;
                Some((later.at, percent))
            });
            of_a_second.collect()
        })
        .collect();
    let most = |curves: &[Vec<(f64, f64)>]| {
        let values = curves.iter().flatten().map(|(_, value)| *value);
        values.fold(1.0, f64::max)
    };
    for (curves, bottom, unit, color) in [
        (&memory, 150.0, "MiB resident", "#4878a8"),
        (&processor, 270.0, "% of a core", "#c07030"),
    ] {
        let highest = most(curves);
        picture.label(10.0, bottom - 90.0, &format!("{highest:.1} {unit}"));
        picture.label(10.0, bottom, "0");
        for curve in curves {
            picture.curve(curve, highest, bottom, 95.0, color);
        }
    }
    let killed = run.agents[0].end.unwrap();
    picture.upright(killed, 34.0, 276.0);
    picture.label(picture.x(killed) + 4.0, 40.0, "kill -9");
    picture.axis(280.0);
    picture.label(10.0, 320.0, made_by);
    picture.end()
}

/// A back-off that the agent's death interrupts ends when it would have ended, and the pictures show it.
#[test]
fn pictures_show_a_restart_that_keeps_containers_and_back_off() {
    let pods = std::env::var("HOLDFAST_PICTURES_PODS");
    let pods: usize = pods.ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    let world = World::new(Version::Installed);
    let from = now();
    let mut run = Run {
        world,
        agents: Vec::new(),
        samples: Vec::new(),
        flaky: BTreeMap::new(),
    };
    let first = run.start();
    run.world.add(
        &run.world
            .pod("flaky", "Always", &[("main", "sleep 2; exit 1")]),
    );
    run.world
        .add(&run.world.pod("hello", "Always", &[("main", FOREVER)]));
    for number in 2..pods {
        let pod = run
            .world
            .pod(&format!("more-{number}"), "Always", &[("main", FOREVER)]);
        run.world.add(&pod);
    }
    // Its third end begins a back-off of 20 seconds.
    let third_end = run.observe(Some(&first), |run| run.end_of(2));
    run.observe(Some(&first), |run| {
        let all_run = run.world.running().len() + 1 >= pods;
        (all_run && now() > third_end + 4.0).then_some(())
    });
    let steady = |run: &Run| {
        let mut running = run.world.running();
        running.retain(|seen| seen.pod != "flaky");
        ids(&running)
    };
    let before = steady(&run);
    run.agents[0].end = Some(now());
    first.kill9();
    let gone = now();
    run.observe(None, |_| (now() > gone + 5.0).then_some(()));
    let second = run.start();
    let last_end = run.observe(Some(&second), |run| run.end_of(3));
    run.observe(Some(&second), |_| (now() > last_end + 3.0).then_some(()));
    let to = now();

    assert_eq!(steady(&run), before, "containers run on");
    // One that began again with the agent would end after more than 30 seconds.
    let waited = run.flaky[&3].begin - run.flaky[&2].end.unwrap();
    assert!((19.0..28.0).contains(&waited), "back-off of {waited} s");

    let hello = run.world.try_one("hello", "main").unwrap();
    let status = run.world.inspect(&hello.id);
    let life = Life {
        begin: seconds(status.started_at),
        end: None,
    };
    let made_by = format!(
        "Measured by tests/agent_real/pictures.rs{}: holdfast, {pods} pods, containerd, {} processors.",
        if std::env::var_os("HOLDFAST_BIN").is_some() {
            ""
        } else {
            " (development build)"
        },
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    );
    let pictures = [
        ("restart.svg", timeline(&run, life, from, to, &made_by)),
        ("usage.svg", usage(&run, pods, from, to, &made_by)),
    ];
    let dir = std::env::var_os("HOLDFAST_PICTURES")
        .map_or_else(|| run.world.dir().join("pictures"), PathBuf::from);
    fs::create_dir_all(&dir).unwrap();
    for (name, text) in pictures {
        assert!(
            text.matches("<rect").count() + text.matches("<polyline").count() > 4,
            "{text}"
        );
        assert!(!text.contains("NaN"), "{text}");
        fs::write(dir.join(name), text).unwrap();
    }
}
