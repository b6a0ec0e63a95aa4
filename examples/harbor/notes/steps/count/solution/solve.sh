#!/bin/sh
wc -l < sorted.txt > count.txt
