#!/bin/sh
sort -u notes.txt > sorted.txt
